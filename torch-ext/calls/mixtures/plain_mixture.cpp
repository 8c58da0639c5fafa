#include "plain_mixture.h"

#include <optional>

#include "../../global_state/modes.h"
#include "../../global_state/settings.h"
#include "../../operands/rows.h"
#include "../direct/call.h"
#include "conditions.h"
#include "direct_mixture.h"

namespace fused_mlp {
namespace {

// The fields of blocks.Record, routers.Router, cached.Entry and experts.Form.
enum RecordField : Py_ssize_t { kBlock, kChildren, kRouter, kExperts };
enum RouterField : Py_ssize_t { kRouterConditions, kTopK, kNormalized, kNarrow, kGroups };
enum EntryField : Py_ssize_t { kEntryConditions, kDtype, kCount, kWeights, kForm };
enum FormField : Py_ssize_t { kActivation, kGated, kInterleaved, kTransposed, kLimit, kUpOffset };

PyObject* child(PyObject* state, PyObject* name) {
  PyObject* const modules = name == Py_None ? nullptr : item(state, names().modules);
  return modules != nullptr && PyDict_Check(modules) ? item(modules, name) : nullptr;
}

// Returns the record of a block for the implementation that transformers selected for its experts; nullptr without an
// error if there is none.
PyObject* record_of(PyObject* records, PyObject* module, PyObject* state) {
  const Owned key(PyLong_FromSsize_t(reinterpret_cast<Py_ssize_t>(module)));
  PyObject* const ways = key ? item(records, key.get()) : nullptr;
  if (ways == nullptr) return nullptr;
  PyObject *way, *record;
  for (Py_ssize_t place = 0; PyDict_Next(ways, &place, &way, &record);) {
    PyObject* const experts = child(state, PyTuple_GetItem(PyTuple_GetItem(record, kChildren), 1));
    PyObject* const of_experts = experts == nullptr ? nullptr : state_of(experts);
    PyObject* const config = of_experts == nullptr ? nullptr : item(of_experts, names().config);
    PyObject* const settings = config == nullptr ? nullptr : state_of(config);
    PyObject* const set = settings == nullptr ? Py_None : item(settings, names().experts_way);
    if (PyErr_Occurred()) return nullptr;
    if (way == (set == nullptr ? Py_None : set)) return record;
  }
  return nullptr;
}

// True if calling a part would run its forward, or the fused one, and it is unchanged since it was recorded.
Answer runs_as_recorded(PyObject* part, PyObject* state, PyObject* conditions, bool recording) {
  const Answer bare = is_bare(part, state, recording, true);
  return bare == kYes ? conditions_hold(conditions, part) : bare;
}

// Reads a parameter of a module into a tuple, and whether it needs a gradient.
bool put_parameter(PyObject* state, PyObject* name, PyObject* dtype, PyObject* operands, Py_ssize_t place) {
  PyObject* parameter = Py_None;
  if (name != Py_None) {
    PyObject* const parameters = item(state, names().parameters);
    parameter = parameters == nullptr || !PyDict_Check(parameters) ? nullptr : item(parameters, name);
    if (parameter == nullptr || class_of(parameter) != settings.parameter) return false;
    if (has_attribute(parameter, names().dtype, dtype) != kYes) return false;
  }
  return put(operands, place, parameter) == kYes;
}

bool read(PyObject* tensor, int dims, const dlpack::Tensor& x, dlpack::Tensor* view) {
  return read_directly(tensor, view) && view->dims == dims && view->dtype == x.dtype && view->device == x.device;
}

// Reads the bias of all experts, if there is one.
bool read_bias(PyObject* bias, const dlpack::Tensor& x, std::optional<dlpack::Tensor>* view) {
  return bias == Py_None || read(bias, 2, x, &view->emplace());
}

enum Operand : Py_ssize_t {
  kX,
  kOfRouter,
  kGateUp,
  kDown,
  kGateUpBias,
  kDownBias,
  kRouterBias,
  kResidual,
  kNorm,
  kOperands = kNorm + 4
};

// Reads the further parameters of a sigmoid router.
bool read_groups(PyObject* bias, PyObject* router, const dlpack::Tensor& x, PlainMixture* m) {
  PyObject* const groups = PyTuple_GetItem(router, kGroups);
  dlpack::Tensor& view = m->router_bias.emplace();
  m->groups = PyLong_AsSsize_t(PyTuple_GetItem(groups, 0));
  m->top_groups = PyLong_AsSsize_t(PyTuple_GetItem(groups, 1));
  m->scaling = PyFloat_AsDouble(PyTuple_GetItem(groups, 2));
  return read_directly(bias, &view) && view.dims == 1 && view.device == x.device &&
         (view.dtype == dlpack::kFloat32 || view.dtype == x.dtype);
}

// Reads the operands. False if they do not fit; a Python error may then be set.
bool read_mixture(PyObject* operands, PyObject* router, PyObject* form, PyObject* rounded, PlainMixture* m) {
  const auto at = [&](Py_ssize_t place) { return PyTuple_GetItem(operands, place); };
  dlpack::Tensor x, residual;
  if (!read_directly(at(kX), &x) || x.dims != 3 || !read_dtype(x, &m->dtype)) return false;
  const Rows rows(x.sizes, x.strides, x.dims);
  if (!rows.adjacent || rows.rows == 0 || rows.cols == 0 || !is_contiguous(x)) return false;
  m->device = x.device.index;
  m->x = {x.data, rows.row_stride};
  m->rows = rows.rows, m->width = rows.cols;
  if (!read(at(kOfRouter), 2, x, &m->router) || !read(at(kGateUp), 3, x, &m->gate_up) ||
      !read(at(kDown), 3, x, &m->down) || !read_bias(at(kGateUpBias), x, &m->gate_up_bias) ||
      !read_bias(at(kDownBias), x, &m->down_bias)) {
    return false;
  }
  m->top_k = PyLong_AsSsize_t(PyTuple_GetItem(router, kTopK));
  m->normalized = PyTuple_GetItem(router, kNormalized) == Py_True;
  m->narrow = PyTuple_GetItem(router, kNarrow) == Py_True;
  const auto of_form = [&](FormField field) { return PyTuple_GetItem(form, field); };
  m->activation = PyLong_AsSsize_t(of_form(kActivation));
  m->gated = of_form(kGated) == Py_True;
  m->interleaved = of_form(kInterleaved) == Py_True;
  m->transposed = of_form(kTransposed) == Py_True;
  if (of_form(kLimit) != Py_None) m->limit = PyFloat_AsDouble(of_form(kLimit));
  m->up_offset = PyFloat_AsDouble(of_form(kUpOffset));
  // There is one expert per router row, and the experts' output rows are as wide as those of x.
  const int64_t out = m->down.sizes[m->transposed ? 2 : 1];
  if (m->router.sizes[0] != m->gate_up.sizes[0] || m->router.sizes[1] != m->width || out != m->width) return false;
  if (PyTuple_GetItem(router, kGroups) != Py_None && !read_groups(at(kRouterBias), router, x, m)) return false;
  m->residual = kNoMatrix;
  m->first.kind = NormKind::kNone;
  if (at(kResidual) == Py_None) return true;
  if (!read(at(kResidual), 3, x, &residual)) return false;
  const Rows of_residual(residual.sizes, residual.strides, residual.dims);
  if (!of_residual.adjacent || of_residual.rows != m->rows || of_residual.cols != m->width) return false;
  m->residual = {residual.data, of_residual.row_stride};
  if (rounded == Py_None) return true;
  m->first.rounded = rounded == Py_True;
  return read_norm_directly(operands, kNorm, x, &m->first) && m->first.weight.stride == 0 && m->first.bias.stride == 0;
}

// True if a block consists only of the sum with a residual, and perhaps the norm of its input.
bool is_plain(const Block& block) {
  return block.modulation == Py_None && block.behind.empty() && block.last == Py_None && !block.wide &&
         PyFloat_CheckExact(block.factor) && PyFloat_AsDouble(block.factor) == 1.0;
}

}  // namespace

PyObject* mixture(PyObject* records, PyObject* module, PyObject* x, bool recording, PyObject* shared,
                  const Block* block) {
  PyObject* const dtype = dtype_taken(x);
  PyObject* const state = dtype == nullptr ? nullptr : state_of(module);
  if (state == nullptr || item(state, names().training) != Py_False || (block != nullptr && !is_plain(*block))) {
    return nullptr;
  }
  PyObject* const record = record_of(records, module, state);
  if (record == nullptr || conditions_hold(PyTuple_GetItem(record, kBlock), module) != kYes) return nullptr;
  PyObject* const children = PyTuple_GetItem(record, kChildren);
  PyObject* const found = PyTuple_GetItem(record, kRouter);
  PyObject* const entry = PyTuple_GetItem(record, kExperts);
  PyObject* const weights = PyTuple_GetItem(entry, kWeights);
  PyObject* const router = child(state, PyTuple_GetItem(children, 0));
  PyObject* const experts = child(state, PyTuple_GetItem(children, 1));
  PyObject* const of_router = router == nullptr ? nullptr : state_of(router);
  PyObject* const of_experts = experts == nullptr ? nullptr : state_of(experts);
  if (of_router == nullptr || of_experts == nullptr || PyTuple_GetItem(entry, kDtype) != dtype) return nullptr;
  if (runs_as_recorded(router, of_router, PyTuple_GetItem(found, kRouterConditions), recording) != kYes ||
      runs_as_recorded(experts, of_experts, PyTuple_GetItem(entry, kEntryConditions), recording) != kYes) {
    return nullptr;
  }
  const Owned given(PyTuple_New(kOperands));
  PyObject* const operands = given.get();
  if (operands == nullptr || put(operands, kX, x) != kYes) return nullptr;
  if (!put_parameter(of_router, names().weight, dtype, operands, kOfRouter)) return nullptr;
  for (Py_ssize_t i = 0; i < 4; ++i) {
    if (!put_parameter(of_experts, PyTuple_GetItem(weights, i), dtype, operands, kGateUp + i)) return nullptr;
  }
  PyObject* const buffers = item(of_router, names().buffers);
  const bool has_bias = PyTuple_GetItem(found, kGroups) != Py_None;
  PyObject* const bias = !has_bias ? Py_None : buffers == nullptr ? nullptr : item(buffers, names().router_bias);
  if (bias == nullptr || (has_bias && class_of(bias) != settings.tensor)) return nullptr;
  PyObject* const name_of_shared = PyTuple_GetItem(children, 2);
  const bool has_shared = name_of_shared != Py_None, waits = has_shared && shared == Py_None;
  if (has_shared ? block != nullptr : shared != Py_None) return nullptr;
  if (waits && child(state, name_of_shared) == nullptr) return nullptr;
  PyObject* const added = block != nullptr ? block->residual : shared;
  PyObject* rounded = Py_None;
  if (put(operands, kRouterBias, bias) != kYes || put(operands, kResidual, added) != kYes) return nullptr;
  if (added != Py_None && (!is_tensor(added) || has_attribute(added, names().dtype, dtype) != kYes)) return nullptr;
  if (block != nullptr && block->first != Py_None) {
    const int64_t width = size_of_last(x);
    if (width < 0 || read_norm(block->first, width, dtype, recording, operands, kNorm) != kYes) return nullptr;
    rounded = PyTuple_GetItem(item(settings.norms, class_of(block->first)), 6);
  } else {
    for (Py_ssize_t place = kNorm; place < kOperands; ++place) {
      if (put(operands, place, Py_None) != kYes) return nullptr;
    }
  }
  if (is_undisturbed() != kYes || is_autocasting() != kNo) return nullptr;
  if (recording && needs_gradient(operands) != kNo) return nullptr;
  PlainMixture m{};
  const bool fits = may_call_directly() && read_mixture(operands, found, PyTuple_GetItem(entry, kForm), rounded, &m) &&
                    !PyErr_Occurred();
  if (fits && waits) {
    Py_INCREF(name_of_shared);
    return name_of_shared;
  }
  return fits ? computed_directly(x, [&](void* out) { return mixture_directly(m, out); }) : nullptr;
}

}  // namespace fused_mlp
