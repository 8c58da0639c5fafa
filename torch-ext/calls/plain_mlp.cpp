#include "plain_mlp.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <functional>
#include <iterator>
#include <numeric>

#include "../global_state/modes.h"
#include "../global_state/settings.h"
#include "../operands/activation.h"
#include "../operands/rows.h"
#include "../ops/norms/norm.h"
#include "direct/call.h"

namespace fused_mlp {
namespace {

// True if the ops do not run on x's GPU. Once they are known to run on every GPU, this is no longer checked.
Answer is_refused(PyObject* x) {
  static Answer on_every_gpu = kNo;
  if (settings.refusal == Py_None || on_every_gpu == kYes) return kNo;
  on_every_gpu = said_by(settings.every_gpu);
  if (on_every_gpu != kNo) return on_every_gpu == kYes ? kNo : kError;
  const Owned index(PyObject_CallMethodObjArgs(x, names().get_device, nullptr));
  if (!index) return kError;
  const Owned refused(PyObject_CallFunctionObjArgs(settings.refusal, index.get(), nullptr));
  return refused ? answer(refused.get() != Py_None) : kError;
}

// The sizes of a tensor, up to a number of dimensions; tensors with more have no sizes here.
struct Sizes {
  int64_t of[8];
  Py_ssize_t dims = 0;

  explicit Sizes(PyObject* tensor) {
    const Owned shape(PyObject_GetAttr(tensor, names().shape));
    if (!shape || !PyTuple_Check(shape.get()) || PyTuple_Size(shape.get()) > std::ssize(of)) return;
    for (; dims < PyTuple_Size(shape.get()) && !PyErr_Occurred(); ++dims) {
      of[dims] = PyLong_AsSsize_t(PyTuple_GetItem(shape.get(), dims));
    }
  }
};

// True if a factor or a term has the features of a tensor's rows in the layout that the ops support, and its dtype, or
// if `wide` float32.
Answer are_features_of(PyObject* given, PyObject* tensor, PyObject* dtype, bool wide) {
  if (!is_tensor(given)) return kNo;
  const Sizes sizes(given), rows(tensor);
  if (PyErr_Occurred()) return kError;
  const bool fit = rows_that_share(sizes.of, sizes.dims, rows.of, rows.dims).has_value();
  const Answer alike = fit ? has_attribute(given, names().dtype, dtype) : kNo;
  return fit && wide && alike == kNo ? has_attribute(given, names().dtype, settings.float32) : alike;
}

// Puts the modulation of a norm of x into the places of the weight and the bias that the norm lacks.
Answer modulate(PyObject* modulation, bool wide, PyObject* x, PyObject* dtype, PyObject* operands, Py_ssize_t place) {
  for (Py_ssize_t i = 0; i < 2; ++i) {
    PyObject* const given = PyTuple_GetItem(modulation, i);
    const bool is_shift = i == 1;
    const Answer fits = is_shift && given == Py_None ? kYes : are_features_of(given, x, dtype, wide);
    if (fits != kYes || PyTuple_GetItem(operands, place + i) != Py_None) return fits == kYes ? kNo : fits;
    if (put(operands, place + i, given) != kYes) return kError;
  }
  const auto kind = static_cast<NormKind>(PyLong_AsSsize_t(PyTuple_GetItem(operands, place + 3)));
  if (kind != NormKind::kLayer && kind != NormKind::kRms) return kNo;
  return put(operands, place + 3, kind == NormKind::kLayer ? names().layer_of_one_more : names().rms_of_one_more);
}

// Puts the block around an MLP with this many features into a tuple from a place on, in the order of the op, and the
// probability of an active dropout after the MLP into `dropped`.
Answer read_block(const Block& block, int64_t features, PyObject* dtype, bool recording, PyObject* operands,
                  Py_ssize_t place, PyObject** dropped) {
  if (class_of(block.residual) != settings.tensor) return kNo;
  PyObject* last = norm_behind(block.behind, recording, dropped);
  if (last == nullptr) return PyErr_Occurred() ? kError : kNo;
  const bool norms_sum = block.last != Py_None;
  if (norms_sum && last != Py_None) return kNo;
  if (norms_sum) last = block.last;
  PyObject *const none = Py_None, *const zero = names().zero, *const code = names().no_norm;
  PyObject *factor = block.factor, *scale = none, *scales = code;
  if (!PyFloat_CheckExact(factor)) {
    const Answer fits = last == none ? are_features_of(factor, block.residual, dtype, block.wide) : kNo;
    if (fits != kYes) return fits;
    scale = factor, scales = names().scale, factor = names().one;
  }
  PyObject* const sum = norms_sum ? Py_True : Py_False;
  PyObject* const given[] = {block.residual, factor, none, none, zero, code, scale, none, zero, scales, sum};
  static_assert(std::size(given) == kBlockOperands);
  for (Py_ssize_t i = 0; i < kBlockOperands; ++i) {
    if (put(operands, place + i, given[i]) != kYes) return kError;
  }
  Answer read = kYes;
  if (block.first != Py_None) {
    PyObject* const x = PyTuple_GetItem(operands, 0);
    const int64_t width = size_of_last(x);
    read = width < 0 ? kError : read_norm(block.first, width, dtype, recording, operands, place + 2);
    if (read == kYes && block.modulation != Py_None) {
      read = modulate(block.modulation, block.modulation_wide, x, dtype, operands, place + 2);
    }
  }
  if (read != kYes || last == Py_None) return read;
  if (features < 0) features = size_of_first(PyTuple_GetItem(operands, place / 2 - 1));  // of the last weight
  if (features < 0) return kError;
  return read_norm(last, features, dtype, recording, operands, place + 6);
}

// True if an MLP or its block is too small for an op that autograd records, by the sizes of x and of its first weight.
// False for a pattern that saves memory, and if the weight is unknown.
Answer is_little(const Mlp& mlp, PyObject* weight, PyObject* code, PyObject* dtype, const Block* block) {
  const bool norms_sum = block != nullptr && block->last != Py_None;
  PyObject* const least_sum = norms_sum ? item(settings.least_sum, dtype) : nullptr;
  if (least_sum != nullptr && number_of_elements(block->residual) < PyLong_AsSsize_t(least_sum)) {
    return PyErr_Occurred() ? kError : kYes;
  }
  if (weight == nullptr || (norms_sum && mlp.projections.size() == 1)) return PyErr_Occurred() ? kError : kNo;
  PyObject* const of_dtype = block == nullptr ? nullptr : item(settings.least_recorded, dtype);
  if (of_dtype == nullptr && PyObject_Size(settings.least_work) == 0) return PyErr_Occurred() ? kError : kNo;
  const Owned memory(PyObject_GetAttr(mlp.pattern, names().memory));
  if (!memory || item(settings.parts, memory.get()) == nullptr) return PyErr_Occurred() ? kError : kNo;
  const Answer gated = attribute_is_true(mlp.pattern, names().gated);
  const int64_t in = gated == kError ? -1 : size_of_last(mlp.x);
  const int64_t elements = in < 0 ? -1 : number_of_elements(mlp.x), of_weight = number_of_elements(weight);
  if (elements < 0 || of_weight < 0) return kError;
  if (in == 0) return kNo;
  if (of_dtype != nullptr) {
    PyObject* const least = item(of_dtype, gated == kYes ? names().gated_mlp : names().mlp);
    PyObject* const share = gated == kYes || code == nullptr ? nullptr : item(settings.shares, code);
    const int64_t values = elements / in * (of_weight / in) / (share == nullptr ? 1 : PyLong_AsSsize_t(share));
    return PyErr_Occurred() ? kError : answer(least != nullptr && values < PyLong_AsSsize_t(least));
  }
  const Answer many = gated == kYes ? kNo : norms_sum ? kYes : is_composite(mlp.act);
  if (many == kError) return kError;
  const int64_t times = many == kYes ? PyLong_AsSsize_t(settings.work_of_many) : 1;
  return is_little_work(gated == kYes, mlp.in_eval, elements * (of_weight / in) * times);
}

// True if autograd certainly records the product of x and a weight.
Answer is_plainly_followed(PyObject* x, PyObject* weight) {
  if (is_as_recorded()) return kYes;
  const Answer followed = attribute_is_true(x, names().requires_grad);
  return followed != kNo || weight == nullptr ? followed : attribute_is_true(weight, names().requires_grad);
}

// True if a block is one that Python records under autograd: x + mlp(norm(x)), or the norm of a sum with the result of
// an MLP or a layer.
Answer is_recorded_block(const Block& block, const Mlp& mlp, PyObject* operands, Py_ssize_t place) {
  PyObject *const factor = PyTuple_GetItem(operands, place + 1), *const last = PyTuple_GetItem(operands, place + 9);
  if (block.modulation != Py_None || PyFloat_AsDouble(factor) != 1.0) return kNo;
  const bool norms_sum = block.last != Py_None;
  if (norms_sum ? block.first != Py_None : block.first == Py_None || block.residual != mlp.x) return kNo;
  if (!norms_sum && last != names().no_norm) return kNo;
  return PyErr_Occurred() ? kError : answer(norms_sum || mlp.projections.size() > 1);
}

// Computes an operation part by part; nullptr without an error if the parts do not fit together.
PyObject* composed(PyObject* pattern, PyObject* operands) {
  PyObject* const alike = is_as_recorded() ? Py_True : Py_False;
  return PyObject_CallFunctionObjArgs(settings.composed, pattern, operands, alike, nullptr);
}

// Computes an operation under autograd by its parts, if these are faster than the recorded op; nullptr without an error
// if they are not.
PyObject* faster_parts(PyObject* pattern, bool packed, PyObject* dtype, PyObject* operands) {
  const Owned memory(PyObject_GetAttr(pattern, names().memory));
  const Owned named(memory ? PyObject_GetAttr(pattern, names().op) : nullptr);
  if (!named) return nullptr;
  PyObject* const op = packed ? names().gated_mlp : named.get();  // which records both
  PyObject* const of_memory = item(settings.parts, memory.get());
  PyObject* const parts = of_memory == nullptr ? nullptr : item(of_memory, op);
  if (parts == nullptr) return nullptr;
  PyObject* const of_dtype = item(settings.least_recorded, dtype);
  PyObject* const least = of_dtype == nullptr ? nullptr : item(of_dtype, op);
  if (PyErr_Occurred()) return nullptr;
  if (least != nullptr) {
    PyObject *const x = PyTuple_GetItem(operands, 0), *const weight = PyTuple_GetItem(operands, 1);
    const int64_t elements = number_of_elements(x), of_weight = elements < 0 ? -1 : number_of_elements(weight);
    const int64_t features = of_weight > 0 ? size_of_first(weight) : 0;
    if (features <= 0 || elements / (of_weight / features) * features >= PyLong_AsSsize_t(least)) return nullptr;
  }
  if (packed) return composed(pattern, operands);
  return PyObject_CallObject(parts, operands);
}

// Returns the op's result from a call past torch's dispatcher; nullptr without an error if the op has to be called.
PyObject* called_directly(PyObject* pattern, bool packed, Py_ssize_t layers, bool block, PyObject* operands,
                          const PackedWeight* quantised) {
  const Answer gated = attribute_is_true(pattern, names().gated);
  if (gated == kError) return nullptr;
  const Answer up_first = packed ? attribute_is_true(pattern, names().up_first) : kNo;
  if (up_first == kError) return nullptr;
  return call_directly({layers, gated == kYes, packed, up_first == kYes, block, quantised}, operands);
}

// True if the code of an activation means none: the op of a block with a single layer applies none.
bool is_linear(PyObject* code) { return PyLong_AsSsize_t(code) == static_cast<Py_ssize_t>(Activation::kLinear); }

// Returns the operands of a block's op, which has None for the first layer if there is a single one.
PyObject* operands_of_op(Py_ssize_t layers, PyObject* operands) {
  if (layers > 1) {
    Py_INCREF(operands);
    return operands;
  }
  const Py_ssize_t size = PyTuple_Size(operands);
  Owned given(PyTuple_New(size + 2));
  for (Py_ssize_t i = 0, place = 0; given && i < size; ++i) {
    const bool of_layer = i == 1 || i == 2;
    if (of_layer && put(given.get(), place++, Py_None) != kYes) return nullptr;
    if (put(given.get(), place++, PyTuple_GetItem(operands, i)) != kYes) return nullptr;
  }
  return given.release();
}

// Returns the result of layers of one dtype, some of which have adapters of that dtype or float32; nullptr without an
// error for other dtypes. `offsets` are those of quantised weights, None for others.
PyObject* with_adapters(PyObject* pattern, bool recording, PyObject* dtype, PyObject* operands, PyObject* adapters,
                        PyObject* offsets) {
  Answer alike = are_of(adapters, dtype);
  if (alike == kNo) alike = are_of(adapters, settings.float32);
  if (alike != kYes || are_of(operands, dtype) != kYes) return nullptr;
  Answer followed = recording ? needs_gradient(operands) : kNo;
  if (followed == kNo && recording) followed = needs_gradient(adapters);
  if (followed == kError) return nullptr;
  PyObject* const recorded = followed == kYes ? Py_True : Py_False;
  return PyObject_CallFunctionObjArgs(settings.adapted, pattern, recorded, operands, adapters, offsets, nullptr);
}

}  // namespace

PyObject* dtype_taken(PyObject* x) {
  if (class_of(x) != settings.tensor || PyObject_Size(settings.blocks) != 1) return nullptr;
  if (attribute_is_true(x, settings.on_device) != kYes || is_refused(x) != kNo) return nullptr;
  const Owned dtype(PyObject_GetAttr(x, names().dtype));
  for (Py_ssize_t i = 0, count = dtype ? PyTuple_Size(settings.dtypes) : 0; i < count; ++i) {
    PyObject* known = PyTuple_GetItem(settings.dtypes, i);
    if (known != dtype.get()) continue;
    const bool may_be_narrowed = known == settings.float32 && settings.is_narrowed != Py_None;
    return may_be_narrowed && said_by(settings.is_narrowed) != kNo ? nullptr : known;
  }
  return nullptr;
}

Answer is_of_other_dtype(PyObject* x) {
  if (class_of(x) != settings.tensor || PyObject_Size(settings.blocks) != 1) return kNo;
  const Owned dtype(PyObject_GetAttr(x, names().dtype));
  const int known = dtype ? PySequence_Contains(settings.dtypes, dtype.get()) : -1;
  if (known != 0) return known < 0 ? kError : kNo;
  const Answer autocasting = is_autocasting();
  return autocasting == kError ? kError : answer(autocasting == kNo);
}

PyObject* dtype_followed(PyObject* x) {
  const bool alike = is_as_recorded(), may_be = alike || aoti_torch_grad_mode_is_enabled();
  if (class_of(x) != settings.tensor || !may_be || PyObject_Size(settings.blocks) != 1) return nullptr;
  if (!alike && attribute_is_true(x, names().requires_grad) != kYes) return nullptr;
  return Owned(PyObject_GetAttr(x, names().dtype)).get();  // torch keeps it alive
}

bool is_tensor(PyObject* operand) {
  return class_of(operand) == settings.tensor || class_of(operand) == settings.parameter;
}

Answer are_of(PyObject* operands, PyObject* dtype) {
  for (Py_ssize_t i = 0, count = PyTuple_Size(operands); i < count; ++i) {
    PyObject* const operand = PyTuple_GetItem(operands, i);
    const Answer same = is_tensor(operand) ? has_attribute(operand, names().dtype, dtype) : kYes;
    if (same != kYes) return same;
  }
  return kYes;
}

Answer needs_gradient(PyObject* operands) {
  if (is_as_recorded()) return kYes;
  Answer needs = kNo;
  for (Py_ssize_t i = 0, count = PyTuple_Size(operands); i < count && needs == kNo; ++i) {
    PyObject* operand = PyTuple_GetItem(operands, i);
    if (is_tensor(operand)) needs = attribute_is_true(operand, names().requires_grad);
    if (needs != kYes) continue;
    const Answer unknown = truth(Owned(PyObject_CallMethodObjArgs(operand, names().is_inference, nullptr)).get());
    if (unknown != kNo) return kError;  // made in inference mode: torch decides
  }
  return needs;
}

int64_t number_of_elements(PyObject* tensor) {
  dlpack::Tensor view;
  if (read_sizes(tensor, &view))
    return std::accumulate(view.sizes, view.sizes + view.dims, int64_t{1}, std::multiplies());
  const Owned numel(PyObject_CallMethodObjArgs(tensor, names().numel, nullptr));
  return numel ? PyLong_AsSsize_t(numel.get()) : -1;
}

Answer is_composite(PyObject* act) {
  const Owned kind(PyObject_GetAttr(class_of(act), names().class_name));
  const bool found = kind && item(settings.composites, kind.get()) != nullptr;
  return PyErr_Occurred() ? kError : answer(found);
}

Answer is_little_work(bool gated, bool in_eval, int64_t work) {
  const Owned key(PyTuple_Pack(2, gated ? Py_True : Py_False, in_eval ? Py_True : Py_False));
  PyObject* const least = key ? item(settings.least_work, key.get()) : nullptr;
  return PyErr_Occurred() ? kError : answer(least != nullptr && work < PyLong_AsSsize_t(least));
}

Answer is_left(const Mlp& mlp, PyObject* dtype, const Block& block) {
  PyObject* const weight = held_weight(mlp.projections[0]);
  return PyErr_Occurred() ? kError : is_little(mlp, weight, nullptr, dtype, &block);
}

static bool is_plain_block(const Mlp& mlp, const Block* block) {
  return block != nullptr && attribute_is_true(mlp.pattern, names().gated) == kNo;
}

// True if the result of a layer with an activation, which autocast casts, may be in float32 unfused.
static Answer may_be_widened(const Mlp& mlp, PyObject* code) {
  PyObject* const widens = PyTuple_GetItem(settings.autocast, 4);
  if (widens == Py_None) return kNo;
  const Answer whole = attribute_is_true(mlp.pattern, names().whole);
  if (whole != kNo) return whole == kYes ? kNo : kError;
  return truth(Owned(PyObject_CallFunctionObjArgs(widens, mlp.act, code, nullptr)).get());
}

static thread_local bool hooked = false;

bool was_hooked() { return hooked; }

PyObject* fused(const Mlp& mlp, bool recording, const Block* block, bool adapted) {
  hooked = false;
  // Check the parts first: one with hooks, or of another class, falls back to the original code as long as it is there.
  PyObject* dtype = dtype_taken(mlp.x);
  if (dtype == nullptr) return nullptr;
  PyObject* known = known_activation(mlp.act, recording);
  if (known == nullptr || is_undisturbed() != kYes) return nullptr;
  PyObject *const code = PyTuple_GetItem(known, 1), *const weight =
                                                        recording ? held_weight(mlp.projections[0]) : nullptr;
  const Answer little = recording && block != nullptr ? is_little(mlp, weight, code, dtype, block) : kNo;
  if (PyErr_Occurred()) return nullptr;
  // This saves all other checks.
  if (little == kYes && is_plainly_followed(mlp.x, weight) == kYes) return PyBool_FromLong(false);
  if (all_pass(mlp.between, recording) != kYes) return nullptr;
  // The op's arguments: x, weights, biases, code, and those of the block.
  const Py_ssize_t layers = mlp.projections.size(), plain = 2 * layers + 2;
  if (block != nullptr && layers == 1 && !is_linear(code)) return nullptr;
  const Owned given(PyTuple_New(block == nullptr ? plain : plain + kBlockOperands));
  PyObject* const operands = given.get();
  if (operands == nullptr) return nullptr;
  const Owned adapters(PyTuple_New(layers * kAdapterPlaces));
  if (!adapters) return nullptr;
  bool has_adapters = false, drops_any = false;
  PackedWeights quantised;
  const Owned offsets(PyTuple_New(layers));
  if (!offsets) return nullptr;
  for (Py_ssize_t i = 0; i < layers; ++i) {
    const Py_ssize_t place = i * kAdapterPlaces;
    bool drops = false;
    const int before = quantised.count;
    const Answer read = read_adapted(mlp.projections[i], recording, dtype, operands, 1 + i, 1 + layers + i,
                                     adapters.get(), place, &drops, &quantised);
    if (drops && read == kNo && mlp.asks) return PyBool_FromLong(false);
    if (i == 0 && read == kNo && (mlp.asks || is_plain_block(mlp, block))) {
      PyObject* const state = state_of(mlp.projections[0]);
      hooked = state != nullptr && is_bare(mlp.projections[0], state, recording, true) == kNo;
      if (hooked) return PyBool_FromLong(false);
    }
    if (read != kYes) return nullptr;
    const bool added = quantised.count > before;
    const Owned offset(added ? PyFloat_FromDouble(quantised.of[before].offset) : nullptr);
    if (put(offsets.get(), i, offset ? offset.get() : Py_None) != kYes) return nullptr;
    drops_any = drops_any || drops;
    has_adapters = has_adapters || PyTuple_GetItem(adapters.get(), place + kA) != Py_None;
  }
  const bool all_quantised = quantised.count == layers;
  if (has_adapters ? block != nullptr || !quantised.in_four_bits() : adapted && !all_quantised) return nullptr;
  if (!has_adapters && quantised.count > 0) {
    const Answer takes = all_quantised ? takes_rows(quantised, mlp.x) : kError;
    if (takes == kNo && !recording && mlp.asks) return PyBool_FromLong(false);
    if (takes != kYes) return nullptr;
  }
  const Owned cast_to(autocast_dtype());
  // Autocast casts for a block's norms and sum, and quantised layers have dtypes of their own.
  if (PyErr_Occurred() || (cast_to && (block != nullptr || quantised.count > 0))) return nullptr;
  if (cast_to && may_be_widened(mlp, code) != kNo) return nullptr;
  for (PyObject* part : mlp.between) {
    if (!is_cast(part)) continue;
    if (cast_to || quantised.count > 0 ||
        has_attribute(PyTuple_GetItem(operands, layers), names().dtype, dtype) != kYes)
      return nullptr;
  }
  if (put(operands, 0, mlp.x) != kYes || put(operands, plain - 1, code) != kYes) return nullptr;
  PyObject* dropped = nullptr;
  const int64_t features = all_quantised ? quantised.of[layers - 1].n : -1;
  if (block != nullptr && read_block(*block, features, dtype, recording, operands, plain, &dropped) != kYes) {
    return nullptr;
  }
  const Answer packed = attribute_is_true(mlp.pattern, names().packed);
  if (drops_any && packed != kNo) return packed == kYes && mlp.asks ? PyBool_FromLong(false) : nullptr;
  if (has_adapters && quantised.count > 0 && packed != kNo) return nullptr;
  if (has_adapters) return with_adapters(mlp.pattern, recording, dtype, operands, adapters.get(), offsets.get());
  const Answer followed = packed == kError ? kError : recording ? needs_gradient(operands) : kNo;
  if (followed == kError || (followed == kYes && all_quantised)) return nullptr;
  if (followed == kYes && block != nullptr) {
    const bool drops = dropped == nullptr || settings.drops == Py_True;
    const bool recorded = drops && little == kNo && is_recorded_block(*block, mlp, operands, plain) == kYes;
    return recorded ? PyTuple_Pack(3, mlp.pattern, operands, drops && dropped ? dropped : names().zero) : nullptr;
  }
  if (dropped != nullptr) return nullptr;
  if (followed == kYes) {
    const Answer left = is_little(mlp, weight, code, dtype, nullptr);
    if (left == kYes) return composed(mlp.pattern, operands);
    if (left == kError) return nullptr;
  }
  const Answer alike = cast_to ? are_of(operands, cast_to.get()) : kYes;
  if (alike != kYes) {
    const bool alone = alike == kNo && followed == kNo;  // under autograd, the casts are recorded
    return alone ? composed(mlp.pattern, operands) : nullptr;
  }
  if (followed == kNo) {
    PyObject* const result = called_directly(mlp.pattern, packed == kYes, layers, block != nullptr, operands,
                                             all_quantised ? quantised.of : nullptr);
    if (result != nullptr || all_quantised || PyErr_Occurred()) return result;
  }
  if (packed == kYes && block != nullptr) return PyTuple_Pack(2, mlp.pattern, operands);
  PyObject* const parts = followed == kYes ? faster_parts(mlp.pattern, packed == kYes, dtype, operands) : nullptr;
  if (parts != nullptr || PyErr_Occurred()) return parts;
  if (packed == kYes || followed == kYes) {
    return PyTuple_Pack(2, followed == kYes ? Py_True : Py_False, operands);
  }
  if (block != nullptr) {
    PyObject* op = item(settings.ops, layers == 3 ? names().gated_block_op : names().block_op);
    const Owned arguments(op == nullptr ? nullptr : operands_of_op(layers, operands));
    return arguments ? PyObject_CallObject(op, arguments.get()) : nullptr;
  }
  const Owned name(PyObject_GetAttr(mlp.pattern, names().op));
  PyObject* op = name ? item(settings.ops, name.get()) : nullptr;
  return op == nullptr ? nullptr : PyObject_CallObject(op, operands);
}

}  // namespace fused_mlp
