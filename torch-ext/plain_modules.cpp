#include "plain_modules.h"

#include <cstdint>
#include <iterator>
#include <map>
#include <span>
#include <utility>

#include "answers.h"
#include "direct_call.h"
#include "owned.h"
#include "settings.h"
#include "surroundings.h"

namespace fused_mlp {
namespace {

using Objects = std::span<PyObject* const>;

// A few borrowed objects in a row, which cost less than a tuple of them.
class Few {
 public:
  // False where there are more than any MLP has.
  bool add(PyObject* object) {
    const bool fits = count_ < kMost;
    if (fits) at_[count_++] = object;
    return fits;
  }
  Objects all() const { return {at_, count_}; }

 private:
  static constexpr size_t kMost = 16;
  PyObject* at_[kMost];
  size_t count_ = 0;
};

// `pairs` hold a name and a value, or a name alone where there must be none.
Answer are_items(PyObject* dictionary, PyObject* pairs) {
  for (Py_ssize_t i = 0, count = PyTuple_Size(pairs); i < count; ++i) {
    PyObject* pair = PyTuple_GetItem(pairs, i);
    const Py_ssize_t size = PyTuple_Size(pair);
    PyObject* name = size < 1 ? nullptr : PyTuple_GetItem(pair, 0);
    PyObject* found = name == nullptr ? nullptr : item(dictionary, name);
    if (PyErr_Occurred()) return kError;
    if (found != (size == 1 ? nullptr : PyTuple_GetItem(pair, 1))) return kNo;
  }
  return kYes;
}

// Whether the forward that a module itself holds is that of its class, bound to it, as `kernels.kernelize` leaves one
// in each module for which it finds no kernel; or where `kernels`, that of a kernel which is known to compute the same.
Answer is_own_forward(PyObject* own, PyObject* module, bool kernels) {
  if (class_of(own) != settings.method) return kNo;
  const Answer to_module = has_attribute(own, names().bound_to, module);
  if (to_module != kYes) return to_module;
  PyObject* const kind = class_of(module);
  const Owned forward(PyObject_GetAttr(kind, names().forward));
  const Owned held(forward ? PyObject_GetAttr(own, names().bound_function) : nullptr);
  if (!held) return kError;
  if (held.get() == forward.get() || !kernels) return answer(held.get() == forward.get());
  const Owned key(PyTuple_Pack(2, kind, held.get()));
  if (!key) return kError;
  const bool known = item(settings.kernels, key.get()) != nullptr;
  return PyErr_Occurred() ? kError : answer(known);
}

// Whether calling a module, which has this __dict__, runs the forward of its class, or where `kernels` that of a kernel
// in its place, and nothing else. Where autograd does not record, torch calls hooks of a backward for nothing: they are
// not asked for.
Answer is_bare(PyObject* module, PyObject* state, bool recording, bool kernels = false) {
  for (PyObject* name : Objects(names().hooks).first(recording ? 4 : 2)) {
    PyObject* hooks = item(state, name);
    if (hooks == nullptr) return PyErr_Occurred() ? kError : kNo;
    const Py_ssize_t count = PyObject_Size(hooks);
    if (count != 0) return count < 0 ? kError : kNo;
  }
  PyObject* const own = item(state, names().forward);
  if (own != nullptr) return is_own_forward(own, module, kernels);
  return PyErr_Occurred() ? kError : kYes;
}

// The __dict__ of a module: borrowed, as the module holds it. Modules have a __getattr__, without which this is
// shorter.
PyObject* state_of(PyObject* module) {
  const Owned state(PyObject_GenericGetAttr(module, names().state));
  if (state && !PyDict_Check(state.get())) {
    PyErr_SetString(PyExc_TypeError, "module must be a torch.nn.Module");
    return nullptr;
  }
  return state.get();
}

// Sets an item of a new tuple to an object, which is borrowed.
Answer put(PyObject* tuple, Py_ssize_t place, PyObject* object) {
  Py_INCREF(object);
  return PyTuple_SetItem(tuple, place, object) == 0 ? kYes : kError;
}

// Puts the weight and the bias of a plain module, whose class has both, or no bias, into a tuple.
Answer read_parameters(PyObject* module, PyObject* state, bool recording, PyObject* weight_name, bool biased,
                       PyObject* operands, Py_ssize_t weight_place, Py_ssize_t bias_place) {
  const Answer bare = is_bare(module, state, recording);
  if (bare != kYes) return bare;
  PyObject* parameters = item(state, names().parameters);
  if (parameters == nullptr || !PyDict_Check(parameters)) return PyErr_Occurred() ? kError : kNo;
  PyObject* weight = item(parameters, weight_name);
  if (weight == nullptr) return PyErr_Occurred() ? kError : kNo;
  PyObject* bias = biased ? item(parameters, names().bias) : Py_None;
  if (bias == nullptr) return PyErr_Occurred() ? kError : kNo;
  if (class_of(weight) != settings.parameter || (bias != Py_None && class_of(bias) != settings.parameter)) return kNo;
  const Answer there = put(operands, weight_place, weight);
  return there == kYes ? put(operands, bias_place, bias) : there;
}

// The weight is put there as [out, in].
Answer read_linear(PyObject* layer, bool recording, PyObject* operands, Py_ssize_t weight_place,
                   Py_ssize_t bias_place) {
  PyObject* const unchanged = class_of(layer) == settings.linear ? nullptr : item(settings.transposed, class_of(layer));
  if (unchanged == nullptr && class_of(layer) != settings.linear) return PyErr_Occurred() ? kError : kNo;
  PyObject* state = state_of(layer);
  if (state == nullptr) return kError;
  Answer read = read_parameters(layer, state, recording, names().weight, true, operands, weight_place, bias_place);
  if (unchanged == nullptr || read != kYes) return read;
  read = are_unchanged(unchanged);
  if (read != kYes) return read;
  const Owned weight(PyObject_CallMethodObjArgs(PyTuple_GetItem(operands, weight_place), names().transpose, nullptr));
  return weight ? put(operands, weight_place, weight.get()) : kError;
}

// Casts to the dtype of the weight behind them are functions; all other parts are modules or numbers.
bool is_cast(PyObject* part) { return class_of(part) == settings.function; }

// Whether hidden values come out as they go in: of dropout that is not training, or has a probability of 0, of an
// nn.Identity, and of a cast, whose dtypes fused() looks at.
Answer passes(PyObject* part, bool recording) {
  if (PyFloat_Check(part)) return answer(PyFloat_AsDouble(part) == 0.0);
  if (is_cast(part)) return kYes;
  const bool identity = class_of(part) == settings.identity;
  if (!identity && class_of(part) != settings.dropout) return kNo;
  PyObject* state = state_of(part);
  if (state == nullptr) return kError;
  if (identity) return is_bare(part, state, recording);
  PyObject* training = item(state, names().training);
  PyObject* p = training == Py_False ? nullptr : item(state, names().probability);
  if (training != Py_False && (p == nullptr || !PyFloat_Check(p) || PyFloat_AsDouble(p) != 0.0)) {
    return PyErr_Occurred() ? kError : kNo;
  }
  return is_bare(part, state, recording);
}

Answer pass(Objects parts, bool recording) {
  for (PyObject* part : parts) {
    const Answer said = passes(part, recording);
    if (said != kYes) return said;
  }
  return kYes;
}

// Whether the ops run on x's GPU. Where they run on all, none is asked for again.
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

// The dtype of a tensor that the compiled ops take, and are free to: borrowed; nullptr where they do not.
PyObject* dtype_taken(PyObject* x) {
  if (class_of(x) != settings.tensor || PyObject_Size(settings.blocks) != 1) return nullptr;
  if (attribute_is_true(x, settings.on_device) != kYes || is_refused(x) != kNo) return nullptr;
  const Owned dtype(PyObject_GetAttr(x, names().dtype));
  for (Py_ssize_t i = 0, count = dtype ? PyTuple_Size(settings.dtypes) : 0; i < count; ++i) {
    PyObject* known = PyTuple_GetItem(settings.dtypes, i);
    if (known == dtype.get()) return known;
  }
  return nullptr;
}

bool is_tensor(PyObject* operand) {
  return class_of(operand) == settings.tensor || class_of(operand) == settings.parameter;
}

// Whether all of these operands, among which are tensors, numbers and None, that are tensors are of a dtype.
Answer are_of(PyObject* operands, PyObject* dtype) {
  for (Py_ssize_t i = 0, count = PyTuple_Size(operands); i < count; ++i) {
    PyObject* const operand = PyTuple_GetItem(operands, i);
    const Answer same = is_tensor(operand) ? has_attribute(operand, names().dtype, dtype) : kYes;
    if (same != kYes) return same;
  }
  return kYes;
}

// Whether one of these operands needs a gradient.
Answer needs_gradient(PyObject* operands) {
  Answer needs = kNo;
  for (Py_ssize_t i = 0, count = PyTuple_Size(operands); i < count && needs == kNo; ++i) {
    PyObject* operand = PyTuple_GetItem(operands, i);
    if (is_tensor(operand)) needs = attribute_is_true(operand, names().requires_grad);
  }
  return needs;
}

// What is known of the class of an activation that is plain: the tuple, borrowed; nullptr without an error where it
// is not.
PyObject* known_activation(PyObject* act, bool recording) {
  PyObject* const kind = class_of(act);
  if (kind == settings.function || kind == settings.builtin) {
    PyObject* const function = item(settings.known, act);
    return function != nullptr && are_unchanged(PyTuple_GetItem(function, 2)) == kYes ? function : nullptr;
  }
  const bool gelu = kind == settings.gelu;
  PyObject* known = gelu ? nullptr : item(settings.known, kind);
  if (known == nullptr && !gelu) return nullptr;
  PyObject* state = state_of(act);
  if (state == nullptr) return nullptr;
  if (gelu) {
    PyObject* approximate = item(state, names().approximate);
    known = approximate == nullptr ? nullptr : item(settings.known, approximate);
    if (known == nullptr) return nullptr;
  }
  const bool plain = is_bare(act, state, recording, true) == kYes &&
                     has_attribute(kind, names().forward, PyTuple_GetItem(known, 0)) == kYes &&
                     has_attribute(kind, names().call, settings.call) == kYes &&
                     are_unchanged(PyTuple_GetItem(known, 2)) == kYes;
  return plain ? known : nullptr;
}

// The dictionaries of a class and its bases, up to nn.Module, in which an attribute hides a child of its name: live
// views, that cost something to make and nothing to ask for their size.
PyObject* dictionaries_of(PyObject* order) {
  Py_ssize_t count = 0;
  while (count < PyTuple_Size(order) && PyTuple_GetItem(order, count) != settings.module) ++count;
  Owned found(PyTuple_New(count));
  for (Py_ssize_t i = 0; found && i < count; ++i) {
    PyObject* attributes = PyObject_GetAttr(PyTuple_GetItem(order, i), names().state);
    if (attributes == nullptr || PyTuple_SetItem(found.get(), i, attributes) != 0) return nullptr;
  }
  return found.release();
}

// How many attributes they have; negative where there is an error.
Py_ssize_t total_size(PyObject* dictionaries) {
  Py_ssize_t total = 0;
  for (Py_ssize_t i = 0, count = PyTuple_Size(dictionaries); i < count; ++i) {
    const Py_ssize_t size = PyObject_Size(PyTuple_GetItem(dictionaries, i));
    if (size < 0) return -1;
    total += size;
  }
  return total;
}

// Whether a class has none of these attributes, which would hide children of the same names, and looks for attributes
// as nn.Module does. To ask for one that is missing costs an exception, so that is asked once, and again where the
// class has got other bases or attributes.
Answer hides_none(PyObject* kind, PyObject* wanted) {
  struct Known {
    PyObject *order, *dictionaries;  // and with the former the class, which lives as long as the process
    Py_ssize_t total;
  };
  static std::map<std::pair<PyObject*, PyObject*>, Known> known;
  const Owned order(PyObject_GetAttr(kind, names().order));
  if (!order) return kError;
  const auto found = known.find({kind, wanted});
  if (found != known.end() && found->second.order == order.get() &&
      found->second.total == total_size(found->second.dictionaries)) {
    return kYes;
  }
  for (PyObject* name : names().finders) {
    const Owned usual(PyObject_GetAttr(settings.module, name));
    const Answer same = usual ? has_attribute(kind, name, usual.get()) : kError;
    if (same != kYes) return same;
  }
  for (Py_ssize_t i = 0, size = PyTuple_Size(wanted); i < size; ++i) {
    PyObject* const name = PyTuple_GetItem(wanted, i);
    if (!PyUnicode_Check(name)) continue;  // a part itself, which is no child
    const Owned hidden(PyObject_GetAttr(kind, name));
    if (hidden) return kNo;
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return kError;
    PyErr_Clear();
  }
  Owned dictionaries(dictionaries_of(order.get()));
  const Py_ssize_t total = dictionaries ? total_size(dictionaries.get()) : -1;
  if (total < 0) return kError;
  if (found == known.end()) Py_INCREF(wanted);
  Py_INCREF(order.get());
  known[{kind, wanted}] = {order.get(), dictionaries.release(), total};
  return kYes;
}

// An MLP, or a part of one, as a module has it now.
struct Mlp {
  PyObject* pattern;
  PyObject* x;
  Objects projections;
  PyObject* act;
  Objects between;
  bool in_eval = false;  // the module is known to be in eval mode
};

// What is around an MLP in its block: the norm of its input; behind its last projection what may pass values on, and
// among that a norm or a scale; a factor; the sum with the residual; and the norm of that. None where there is no norm.
struct Block {
  PyObject* first;
  Objects behind;
  PyObject* factor;
  PyObject* residual;
  PyObject* last;
};

// Whether a norm that knows the shape of what it norms, as torch's do, knows that of its weight.
Answer norms_last_dimension(PyObject* state, PyObject* weight) {
  PyObject* normalized = item(state, names().normalized);
  if (normalized == nullptr || !PyTuple_Check(normalized)) return PyErr_Occurred() ? kError : kNo;
  if (PyTuple_Size(normalized) != 1) return kNo;
  const Owned size(PyObject_CallMethodObjArgs(weight, names().numel, nullptr));
  if (!size) return kError;
  return answer(PyLong_AsSsize_t(size.get()) == PyLong_AsSsize_t(PyTuple_GetItem(normalized, 0)));
}

// Puts weight, bias, eps and code of a plain norm over the last dimension into a tuple, in this order. That the weight
// is of that dimension the op itself asks. Its class is known by a tuple: (code, name of eps or None, whether it is one
// of torch's, whether it has a bias, attributes that are unchanged, names that the module itself must not have, names
// that its class must not have, name of the weight).
Answer read_norm(PyObject* norm, PyObject* dtype, bool recording, PyObject* operands, Py_ssize_t place) {
  PyObject* known = item(settings.norms, class_of(norm));
  PyObject* state = known == nullptr ? nullptr : state_of(norm);
  if (state == nullptr) return PyErr_Occurred() ? kError : kNo;
  const bool of_torch = PyTuple_GetItem(known, 2) != Py_False, biased = PyTuple_GetItem(known, 3) != Py_False;
  Answer said = read_parameters(norm, state, recording, PyTuple_GetItem(known, 7), biased, operands, place, place + 1);
  if (said == kYes) said = are_unchanged(PyTuple_GetItem(known, 4));
  if (said == kYes) said = are_items(state, PyTuple_GetItem(known, 5));
  PyObject* weight = PyTuple_GetItem(operands, place);
  if (said == kYes) {
    said = of_torch ? norms_last_dimension(state, weight) : hides_none(class_of(norm), PyTuple_GetItem(known, 6));
  }
  if (said != kYes) return said;
  PyObject* const named = PyTuple_GetItem(known, 1);
  PyObject* const eps = named == Py_None ? names().zero : item(state, named);
  if (eps == nullptr || !PyFloat_Check(eps)) return PyErr_Occurred() ? kError : kNo;
  if (put(operands, place + 2, eps) != kYes || put(operands, place + 3, PyTuple_GetItem(known, 0)) != kYes) {
    return kError;
  }
  return has_attribute(weight, names().dtype, dtype);
}

// The norm or scale that is behind an MLP, None where there is none: borrowed; nullptr, which is no error in itself,
// where another part does not pass values on.
PyObject* norm_behind(Objects parts, bool recording) {
  PyObject* norm = Py_None;
  for (PyObject* part : parts) {
    if (norm == Py_None && item(settings.norms, class_of(part)) != nullptr) {
      norm = part;
    } else if (passes(part, recording) != kYes) {
      return nullptr;
    }
  }
  return norm;
}

constexpr Py_ssize_t kBlockOperands = 11;

// Puts what is around an MLP into a tuple, as the op has it from a place on.
Answer read_block(const Block& block, PyObject* dtype, bool recording, PyObject* operands, Py_ssize_t place) {
  if (class_of(block.residual) != settings.tensor || !PyFloat_CheckExact(block.factor)) return kNo;
  PyObject* last = norm_behind(block.behind, recording);
  if (last == nullptr) return PyErr_Occurred() ? kError : kNo;
  const bool norms_sum = block.last != Py_None;
  if (norms_sum && last != Py_None) return kNo;
  if (norms_sum) last = block.last;
  PyObject *const none = Py_None, *const zero = names().zero, *const code = names().no_norm;
  PyObject* const sum = norms_sum ? Py_True : Py_False;
  PyObject* const given[] = {block.residual, block.factor, none, none, zero, code, none, none, zero, code, sum};
  static_assert(std::size(given) == kBlockOperands);
  for (Py_ssize_t i = 0; i < kBlockOperands; ++i) {
    if (put(operands, place + i, given[i]) != kYes) return kError;
  }
  const Answer read = block.first == Py_None ? kYes : read_norm(block.first, dtype, recording, operands, place + 2);
  return read != kYes || last == Py_None ? read : read_norm(last, dtype, recording, operands, place + 6);
}

int64_t number_of_elements(PyObject* tensor) {
  const Owned numel(PyObject_CallMethodObjArgs(tensor, names().numel, nullptr));
  return numel ? PyLong_AsSsize_t(numel.get()) : -1;
}

// Whether the first layer does too little on a GPU for an op that autograd records, by so many multiplications.
Answer is_little(bool gated, bool in_eval, int64_t work) {
  const Owned key(PyTuple_Pack(2, gated ? Py_True : Py_False, in_eval ? Py_True : Py_False));
  PyObject* const least = key ? item(settings.least_work, key.get()) : nullptr;
  return PyErr_Occurred() ? kError : answer(least != nullptr && work < PyLong_AsSsize_t(least));
}

// Asks the same of an MLP. One whose pattern is to save memory is never too little.
Answer is_little(const Mlp& mlp, PyObject* operands) {
  if (PyObject_Size(settings.least_work) == 0) return kNo;
  const Owned memory(PyObject_GetAttr(mlp.pattern, names().memory));
  if (!memory || item(settings.parts, memory.get()) == nullptr) return PyErr_Occurred() ? kError : kNo;
  const Answer gated = attribute_is_true(mlp.pattern, names().gated);
  const int64_t elements = number_of_elements(PyTuple_GetItem(operands, 0));
  const Py_ssize_t features = PyObject_Size(PyTuple_GetItem(operands, 1));
  if (gated == kError || elements < 0 || features < 0) return kError;
  return is_little(gated == kYes, mlp.in_eval, elements * features);
}

// Computes what autograd follows by its parts, where these take less time than the op and what records it; nullptr
// without an error where they do not.
PyObject* faster_parts(PyObject* pattern, bool packed, PyObject* dtype, PyObject* operands) {
  const Owned memory(PyObject_GetAttr(pattern, names().memory)), named(PyObject_GetAttr(pattern, names().op));
  if (!memory || !named) return nullptr;
  PyObject* const op = packed ? names().gated_mlp : named.get();  // which records both
  PyObject* const of_memory = item(settings.parts, memory.get());
  PyObject* const parts = of_memory == nullptr ? nullptr : item(of_memory, op);
  if (parts == nullptr) return nullptr;
  PyObject* const of_dtype = item(settings.least_recorded, dtype);
  PyObject* const least = of_dtype == nullptr ? nullptr : item(of_dtype, op);
  if (least != nullptr) {
    PyObject *const x = PyTuple_GetItem(operands, 0), *const weight = PyTuple_GetItem(operands, 1);
    const int64_t elements = number_of_elements(x), of_weight = number_of_elements(weight);
    const int64_t features = of_weight > 0 ? PyObject_Size(weight) : 0;
    if (features <= 0 || elements / (of_weight / features) * features >= PyLong_AsSsize_t(least)) return nullptr;
  }
  if (packed) return PyObject_CallFunctionObjArgs(settings.composed, pattern, operands, nullptr);
  return PyObject_CallObject(parts, operands);
}

// The result of the op past torch's dispatcher; nullptr without an error where it has to be called.
PyObject* called_directly(PyObject* pattern, bool packed, Py_ssize_t layers, bool block, PyObject* operands) {
  const Answer gated = attribute_is_true(pattern, names().gated);
  const Answer up_first = packed ? attribute_is_true(pattern, names().up_first) : kNo;
  if (gated == kError || up_first == kError) return nullptr;
  return call_directly({layers, gated == kYes, packed, up_first == kYes, block}, operands);
}

// The result, or the operands of the op where that is left to Python. nullptr is an error where one is set, else an
// answer: it is not known. With a block, the result is that of the block, and what is left is a pair: the pattern,
// whose gate and up are packed, and the operands.
PyObject* fused(const Mlp& mlp, bool recording, const Block* block = nullptr) {
  PyObject* dtype = dtype_taken(mlp.x);
  if (dtype == nullptr || is_undisturbed() != kYes) return nullptr;
  const Owned cast_to(autocast_dtype());
  if (PyErr_Occurred() || (cast_to && block != nullptr)) return nullptr;  // autocast casts for a block's norms and sum
  PyObject* known = known_activation(mlp.act, recording);
  if (known == nullptr || pass(mlp.between, recording) != kYes) return nullptr;
  // The op's arguments: x, weights, biases, code, and those of the block, which is that of a whole MLP.
  const Py_ssize_t layers = mlp.projections.size(), plain = 2 * layers + 2;
  if (block != nullptr && layers < 2) return nullptr;
  const Owned given(PyTuple_New(block == nullptr ? plain : plain + kBlockOperands));
  PyObject* const operands = given.get();
  if (operands == nullptr) return nullptr;
  for (Py_ssize_t i = 0; i < layers; ++i) {
    if (read_linear(mlp.projections[i], recording, operands, 1 + i, 1 + layers + i) != kYes) return nullptr;
  }
  for (PyObject* part : mlp.between) {
    if (!is_cast(part)) continue;
    if (cast_to || has_attribute(PyTuple_GetItem(operands, layers), names().dtype, dtype) != kYes) return nullptr;
  }
  if (put(operands, 0, mlp.x) != kYes || put(operands, plain - 1, PyTuple_GetItem(known, 1)) != kYes) return nullptr;
  if (block != nullptr && read_block(*block, dtype, recording, operands, plain) != kYes) return nullptr;
  const Answer packed = attribute_is_true(mlp.pattern, names().packed);
  const Answer followed = recording ? needs_gradient(operands) : kNo;
  if (packed == kError || followed == kError || (followed == kYes && block != nullptr)) return nullptr;
  if (followed == kYes) {
    const Answer little = is_little(mlp, operands);
    if (little == kYes) return PyObject_CallFunctionObjArgs(settings.composed, mlp.pattern, operands, nullptr);
    if (little == kError) return nullptr;
  }
  const Answer alike = cast_to ? are_of(operands, cast_to.get()) : kYes;
  if (alike != kYes) {
    const bool alone = alike == kNo && followed == kNo;  // where autograd follows, it is told of the casts
    return alone ? PyObject_CallFunctionObjArgs(settings.composed, mlp.pattern, operands, nullptr) : nullptr;
  }
  if (followed == kNo) {
    PyObject* const result = called_directly(mlp.pattern, packed == kYes, layers, block != nullptr, operands);
    if (result != nullptr || PyErr_Occurred()) return result;
  }
  if (packed == kYes && block != nullptr) return PyTuple_Pack(2, mlp.pattern, operands);
  PyObject* const parts = followed == kYes ? faster_parts(mlp.pattern, packed == kYes, dtype, operands) : nullptr;
  if (parts != nullptr || PyErr_Occurred()) return parts;
  if (packed == kYes || followed == kYes) {
    Py_INCREF(operands);
    return operands;
  }
  if (block != nullptr) {
    PyObject* op = item(settings.ops, layers == 2 ? names().block_op : names().gated_block_op);
    return op == nullptr ? nullptr : PyObject_CallObject(op, operands);
  }
  const Owned name(PyObject_GetAttr(mlp.pattern, names().op));
  PyObject* op = name ? item(settings.ops, name.get()) : nullptr;
  return op == nullptr ? nullptr : PyObject_CallObject(op, operands);
}

// A module, whose children are found by their names, as its attributes are.
class Owner {
 public:
  Answer open(PyObject* module, PyObject* state, PyObject* names) {
    state_ = state;
    modules_ = item(state, fused_mlp::names().modules);
    if (modules_ == nullptr || !PyDict_Check(modules_)) return PyErr_Occurred() ? kError : kNo;
    return hides_none(class_of(module), names);
  }
  // Borrowed; nullptr where a name stands for something else. What is no name stands for itself.
  PyObject* part(PyObject* given) const {
    if (modules_ == nullptr || !PyUnicode_Check(given)) return given;
    PyObject* const child = item(modules_, given);
    const bool is_child = child != nullptr && child != Py_None && item(state_, given) == nullptr;
    return is_child && PyErr_Occurred() == nullptr ? child : nullptr;
  }
  bool is_in_eval() const { return state_ != nullptr && item(state_, fused_mlp::names().training) == Py_False; }
  // False where one stands for something else, or there are more than any MLP has.
  bool add_all(PyObject* given, Few* found) const {
    for (Py_ssize_t i = 0, count = PyTuple_Size(given); i < count; ++i) {
      PyObject* const found_part = part(PyTuple_GetItem(given, i));
      if (found_part == nullptr || !found->add(found_part)) return false;
    }
    return true;
  }

 private:
  PyObject* state_ = nullptr;
  PyObject* modules_ = nullptr;
};

// The children of a module under these names.
Answer read_children(PyObject* module, PyObject* state, PyObject* names, Few* found) {
  Owner owner;
  const Answer opened = owner.open(module, state, names);
  return opened == kYes ? answer(owner.add_all(names, found)) : opened;
}

// The half that calling a module runs, and nothing else: borrowed; nullptr where that is not known, or it has no names.
PyObject* running(PyObject* module, PyObject* state, PyObject* halves, bool recording) {
  PyObject* const kind = class_of(module);
  const Owned forward(PyObject_GetAttr(kind, names().forward));
  PyObject* half = forward ? item(halves, forward.get()) : nullptr;
  if (half == nullptr || PyTuple_GetItem(half, 1) == Py_None) return nullptr;
  if (has_attribute(kind, names().call, settings.call) != kYes || is_bare(module, state, recording) != kYes)
    return nullptr;
  PyObject* written = PyTuple_GetItem(half, 0);
  if (forward.get() == written) return half;
  // Fused: is the forward of its class still the one that it was made from? The module has the attribute where it is
  // restored, as None, and else its class.
  if (item(state, settings.original) != nullptr || PyErr_Occurred()) return nullptr;
  const Owned original(PyObject_GetAttr(kind, settings.original));
  return original && has_attribute(original.get(), names().forward, written) == kYes ? half : nullptr;
}

// Whether nothing was found because it is not known, or cannot be asked; the error is forgotten then.
bool is_answer() {
  PyObject* const meant[] = {PyExc_AttributeError, PyExc_RuntimeError, PyExc_TypeError};
  for (PyObject* error : meant) {
    if (PyErr_Occurred() && PyErr_ExceptionMatches(error)) PyErr_Clear();
  }
  return PyErr_Occurred() == nullptr;
}

// Whether autograd records whatever is computed from x. In training that is so for most calls, whose ops Python
// records: asked first, it saves all other questions.
Answer is_followed(PyObject* x, Answer recording) {
  if (recording != kYes || class_of(x) != settings.tensor) return recording == kError ? kError : kNo;
  return attribute_is_true(x, names().requires_grad);
}

// `rest` are the arguments of the tail behind its first one.
PyObject* joined(PyObject* heads, PyObject* tails, PyObject* owner, PyObject* halves, PyObject* x, PyObject* rest) {
  const Answer asked = is_recording();
  if (is_followed(x, asked) != kNo) return nullptr;
  const bool recording = asked == kYes;
  PyObject* state = state_of(owner);
  Few both, starts, ends;
  if (state == nullptr || read_children(owner, state, halves, &both) != kYes) return nullptr;
  PyObject *const tail = both.all()[0], *const head = both.all()[1];
  PyObject* tail_state = state_of(tail);
  PyObject* head_state = tail_state == nullptr ? nullptr : state_of(head);
  PyObject* first = head_state == nullptr ? nullptr : running(head, head_state, heads, recording);
  PyObject* last = first == nullptr ? nullptr : running(tail, tail_state, tails, recording);
  if (last == nullptr) return nullptr;
  PyObject* of_head = PyTuple_GetItem(first, 1);
  if (read_children(head, head_state, PyTuple_GetItem(of_head, 1), &starts) != kYes ||
      read_children(tail, tail_state, PyTuple_GetItem(last, 1), &ends) != kYes) {
    return nullptr;
  }
  // The head gave its activation and projections, the tail its projection, what hands values on, and its norm.
  PyObject* ending = PyTuple_GetItem(last, 2);
  const bool normed = PyObject_IsTrue(ending) == 1;
  const Objects parts = ends.all(), between = parts.subspan(1, parts.size() - 1 - normed);
  Few& given = starts;
  if (!given.add(parts[0])) return nullptr;
  const Mlp mlp{PyTuple_GetItem(of_head, 0), x, given.all().subspan(1), given.all()[0], between};
  if (ending != Py_None && PyTuple_Size(rest) == 1) {
    const Block block{Py_None, {}, names().one, PyTuple_GetItem(rest, 0), normed ? parts.back() : Py_None};
    Owned whole(fused(mlp, recording, &block));
    if (!whole && !is_answer()) return nullptr;
    if (whole && class_of(whole.get()) == settings.tensor) return whole.release();  // or operands, as below
  }
  const Owned result(fused(mlp, recording));
  if (!result || class_of(result.get()) != settings.tensor) return nullptr;  // or operands: the op is not called here
  return PyTuple_Pack(3, result.get(), last, tail);
}

PyObject* block_of(PyObject* wholes, PyObject* module, PyObject* x, bool recording, const Block& block) {
  PyObject* state = state_of(module);
  PyObject* half = state == nullptr ? nullptr : running(module, state, wholes, recording);
  if (half == nullptr) return nullptr;
  PyObject* names = PyTuple_GetItem(half, 1);
  const bool drops = PyTuple_GetItem(names, 3) != Py_False;
  if (drops && item(state, fused_mlp::names().training) != Py_False) return nullptr;
  Few found;
  if (read_children(module, state, PyTuple_GetItem(names, 1), &found) != kYes) return nullptr;
  const Objects parts = found.all();
  const size_t layers = PyLong_AsSsize_t(PyTuple_GetItem(names, 2));
  const Mlp mlp{PyTuple_GetItem(names, 0), x, parts.subspan(1, layers), parts[0], parts.subspan(1 + layers)};
  return fused(mlp, recording, &block);
}

PyObject* boolean(Answer said) { return said == kError ? nullptr : PyBool_FromLong(said); }

// None for what is not known, or cannot be asked: the caller then asks in other ways, and says what is wrong.
PyObject* answered(PyObject* found) {
  if (found != nullptr || !is_answer()) return found;
  Py_RETURN_NONE;
}

// The arguments of a function, each of the kind that a letter names: a dict, a tuple or any object. Less code than
// PyArg_ParseTuple runs.
template <size_t kEnd>
bool unpack(PyObject* given, const char (&kinds)[kEnd], PyObject* (&arguments)[kEnd - 1]) {
  bool fits = PyTuple_Size(given) == kEnd - 1;
  for (size_t i = 0; fits && i < kEnd - 1; ++i) {
    PyObject* const argument = arguments[i] = PyTuple_GetItem(given, i);
    fits = kinds[i] == 'o' || (kinds[i] == 'd' ? PyDict_Check(argument) : PyTuple_Check(argument));
  }
  if (!fits) PyErr_Format(PyExc_TypeError, "arguments must be of the kinds %s, got %R", kinds, given);
  return fits;
}

PyObject* py_configure(PyObject*, PyObject* given) {
  if (!configure(given)) return nullptr;
  Py_RETURN_NONE;
}

PyObject* py_is_bare(PyObject*, PyObject* module) {
  PyObject* state = state_of(module);
  return state == nullptr ? nullptr : boolean(is_bare(module, state, true));
}

PyObject* py_is_undisturbed(PyObject*, PyObject*) {
  const PastModes modes;
  if (modes.said() != kYes) return boolean(modes.said());
  const Answer casts = is_autocasting();
  return boolean(casts == kNo ? is_undisturbed() : casts == kYes ? kNo : kError);
}

PyObject* py_are_items(PyObject*, PyObject* given) {
  PyObject* of[2];
  return unpack(given, "dt", of) ? boolean(are_items(of[0], of[1])) : nullptr;
}

PyObject* py_is_recorded(PyObject*, PyObject* operands) {
  const Py_ssize_t count = PyTuple_Check(operands) ? PyTuple_Size(operands) : 0;
  if (count < 1) return PyErr_Format(PyExc_TypeError, "operands must be a tuple with an input, got %R", operands);
  const PastModes modes;
  if (modes.said() != kYes) return answered(nullptr);
  bool plain = dtype_taken(PyTuple_GetItem(operands, 0)) != nullptr && is_undisturbed() == kYes;
  for (Py_ssize_t i = 1; plain && i < count; ++i) {
    PyObject* operand = PyTuple_GetItem(operands, i);
    plain = operand == Py_None || is_tensor(operand);
  }
  const Owned cast_to(plain ? autocast_dtype() : nullptr);
  plain = plain && !PyErr_Occurred() && (!cast_to || are_of(operands, cast_to.get()) == kYes);
  const Answer recording = plain ? is_recording() : kNo;
  return answered(plain ? boolean(recording == kYes ? needs_gradient(operands) : recording) : nullptr);
}

PyObject* py_directly(PyObject*, PyObject* given) {
  PyObject* of[2];
  if (!unpack(given, "ot", of)) return nullptr;
  const Py_ssize_t size = PyTuple_Size(of[1]);
  const bool block = size % 2 != 0;
  const Py_ssize_t weights = (size - (block ? kBlockOperands : 0)) / 2 - 1;
  if (weights < 1 || weights > 3) {
    return PyErr_Format(PyExc_TypeError, "operands must be those of an op, got %R", of[1]);
  }
  const PastModes modes;
  if (modes.said() != kYes) return answered(nullptr);
  const DirectForm form{weights, of[0] == Py_True, false, false, block};
  return answered(call_directly(form, of[1]));
}

// Whether a module has an activation that is several operations of torch, so that its parts take long.
Answer has_composite(PyObject* state) {
  PyObject *const modules = item(state, names().modules), *name, *child;
  if (modules == nullptr || !PyDict_Check(modules)) return PyErr_Occurred() ? kError : kNo;
  for (Py_ssize_t place = 0; PyDict_Next(modules, &place, &name, &child);) {
    const Owned kind(PyObject_GetAttr(class_of(child), names().class_name));
    const bool found = kind && item(settings.composites, kind.get()) != nullptr;
    if (found || PyErr_Occurred()) return found ? kYes : kError;
  }
  return kNo;
}

// Answers for py_runs_as_written(). It takes the MLP for one with four times as many hidden features as inputs.
Answer runs_as_written(PyObject* x, PyObject* module, bool gated) {
  constexpr int64_t kWider = 4;
  const Answer recording = is_recording(), casting = is_autocasting();
  if (recording != kYes && casting != kYes) return recording == kError || casting == kError ? kError : kNo;
  const PastModes modes;
  PyObject* const dtype = modes.said() == kYes ? dtype_taken(x) : nullptr;
  if (dtype == nullptr) return PyErr_Occurred() ? kError : kNo;
  const Owned cast_to(casting == kYes ? autocast_dtype() : nullptr);
  const bool cast = cast_to && cast_to.get() != dtype;
  const Answer followed = is_followed(x, recording);
  if (PyErr_Occurred()) return kError;
  if (!cast && followed != kYes) return kNo;
  PyObject* const state = state_of(module);
  const Answer composite = state == nullptr ? kError : has_composite(state);
  if (composite != kNo) return composite == kYes ? kNo : kError;
  if (followed != kYes && !gated) return kYes;  // all of it is torch's, products that cast and an activation
  const int64_t hidden = kWider * number_of_elements(x);
  PyObject* const of_dtype = item(settings.least_recorded, cast ? cast_to.get() : dtype);
  PyObject* const least = of_dtype == nullptr ? nullptr : item(of_dtype, gated ? names().gated_mlp : names().mlp);
  if (least != nullptr) return answer(hidden < PyLong_AsSsize_t(least));
  const Owned width(PyObject_CallMethodObjArgs(x, names().size, names().last, nullptr));
  if (!width) return kError;
  const bool in_eval = followed != kYes || item(state, names().training) == Py_False;
  return is_little(gated, in_eval, hidden * PyLong_AsSsize_t(width.get()));
}

PyObject* py_runs_as_written(PyObject*, PyObject* given) {
  PyObject* of[3];
  if (!unpack(given, "ooo", of)) return nullptr;
  const Answer left = runs_as_written(of[0], of[1], of[2] == Py_True);
  return boolean(left == kError && is_answer() ? kNo : left);
}

PyObject* py_are_unchanged(PyObject*, PyObject* triples) { return boolean(are_unchanged(triples)); }

// Whose children the names among the arguments are: the last two are the module and all the names, if there are any.
Answer open(Owner* owner, PyObject* module, PyObject* names) {
  if (PyTuple_Size(names) == 0) return kYes;
  PyObject* const state = state_of(module);
  return state == nullptr ? kError : owner->open(module, state, names);
}

PyObject* py_fused(PyObject*, PyObject* given) {
  PyObject* of[7];
  if (!unpack(given, "oototot", of)) return nullptr;
  const PastModes modes;
  if (modes.said() != kYes) return answered(nullptr);
  Owner owner;
  Few projections, between;
  const Answer recording = is_recording();
  if (recording == kError || open(&owner, of[5], of[6]) != kYes) return answered(nullptr);
  PyObject* const act = owner.part(of[3]);
  const bool known = act != nullptr && owner.add_all(of[2], &projections) && owner.add_all(of[4], &between);
  const Mlp mlp{of[0], of[1], projections.all(), act, between.all(), owner.is_in_eval()};
  return answered(known ? fused(mlp, recording == kYes) : nullptr);
}

PyObject* py_block(PyObject*, PyObject* given) {
  PyObject* of[12];
  if (!unpack(given, "ootottooooot", of)) return nullptr;
  const PastModes modes;
  if (modes.said() != kYes) return answered(nullptr);
  Owner owner;
  Few projections, between, behind;
  const Answer recording = is_recording();
  if (is_followed(of[1], recording) != kNo || is_autocasting() != kNo || open(&owner, of[10], of[11]) != kYes)
    return answered(nullptr);
  PyObject *const act = owner.part(of[3]), *const first = owner.part(of[8]), *const last = owner.part(of[9]);
  const bool known = act != nullptr && first != nullptr && last != nullptr && owner.add_all(of[2], &projections) &&
                     owner.add_all(of[4], &between) && owner.add_all(of[5], &behind);
  const Mlp mlp{of[0], of[1], projections.all(), act, between.all()};
  const Block block{first, behind.all(), of[6], of[7], last};
  return answered(known ? fused(mlp, recording == kYes, &block) : nullptr);
}

PyObject* py_block_of(PyObject*, PyObject* given) {
  PyObject* of[10];
  if (!unpack(given, "dootooooot", of)) return nullptr;
  const PastModes modes;
  if (modes.said() != kYes) return answered(nullptr);
  Owner owner;
  Few behind;
  const Answer recording = is_recording();
  if (is_followed(of[2], recording) != kNo || is_autocasting() != kNo || open(&owner, of[8], of[9]) != kYes)
    return answered(nullptr);
  PyObject *const module = owner.part(of[1]), *const first = owner.part(of[6]), *const last = owner.part(of[7]);
  const bool known = module != nullptr && first != nullptr && last != nullptr && owner.add_all(of[3], &behind);
  const Block block{first, behind.all(), of[4], of[5], last};
  return answered(known ? block_of(of[0], module, of[2], recording == kYes, block) : nullptr);
}

PyObject* py_joined(PyObject*, PyObject* given) {
  PyObject* of[6];
  if (!unpack(given, "ddotot", of)) return nullptr;
  const PastModes modes;
  return answered(modes.said() == kYes ? joined(of[0], of[1], of[2], of[3], of[4], of[5]) : nullptr);
}

}  // namespace

PyMethodDef plain_module_methods[] = {
    {"configure", py_configure, METH_O, nullptr},
    {"is_bare", py_is_bare, METH_O, nullptr},
    {"is_undisturbed", py_is_undisturbed, METH_NOARGS, nullptr},
    {"are_items", py_are_items, METH_VARARGS, nullptr},
    {"are_unchanged", py_are_unchanged, METH_O, nullptr},
    {"is_recorded", py_is_recorded, METH_O, nullptr},
    {"runs_as_written", py_runs_as_written, METH_VARARGS, nullptr},
    {"directly", py_directly, METH_VARARGS, nullptr},
    {"fused", py_fused, METH_VARARGS, nullptr},
    {"block", py_block, METH_VARARGS, nullptr},
    {"block_of", py_block_of, METH_VARARGS, nullptr},
    {"joined", py_joined, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace fused_mlp
