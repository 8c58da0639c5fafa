#include "plain_modules.h"

namespace fused_mlp {
namespace {

// A reference that is given back.
class Owned {
 public:
  explicit Owned(PyObject* object) : object_(object) {}
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() { Py_XDECREF(object_); }
  PyObject* get() const { return object_; }
  explicit operator bool() const { return object_ != nullptr; }
  PyObject* release() {
    PyObject* object = object_;
    object_ = nullptr;
    return object;
  }

 private:
  PyObject* object_;
};

// Set once, by configure(), and never given back: they live as long as the process.
struct Settings {
  PyObject* tensor;  // the classes torch.Tensor, nn.Parameter, nn.Linear, nn.Dropout, nn.GELU, nn.LayerNorm
  PyObject* parameter;
  PyObject* linear;
  PyObject* dropout;
  PyObject* gelu;
  PyObject* layer_norm;
  PyObject* module;           // nn.Module
  PyObject* call;             // nn.Module.__call__ as torch wrote it
  PyObject* original;         // the attribute by which a fused module has the class that it was made from
  PyObject* known;            // by class of activation, of nn.GELU by `approximate`: (forward, code, unchanged)
  PyObject* ops;              // by name
  PyObject* dtypes;           // those that the ops take
  PyObject* on_device;        // the attribute of a tensor that is true on their device
  PyObject* refusal;          // of an index of a GPU: None where the ops run on it; None for a CPU
  PyObject* blocks;           // a list of one element while no backend is forced
  PyObject* is_grad_enabled;  // the functions of torch
  PyObject* is_inference;
  PyObject* hiding_none;  // by classes of modules, an empty dictionary: what hides_none() found
  PyObject* quiet;        // functions that return something true where every call is disturbed
  PyObject* empty;        // dictionaries that hold something there
  PyObject* unchanged;    // triples (owner, name, value): attributes that are another object there
  PyObject* of_norms;     // the same of nn.LayerNorm
};
Settings settings{};

// In the order of Settings.
constexpr const char* kSettings[] = {
    "tensor",       "parameter",   "linear", "dropout", "gelu",      "layer_norm", "module", "call",
    "original",     "known",       "ops",    "dtypes",  "on_device", "refusal",    "blocks", "is_grad_enabled",
    "is_inference", "hiding_none", "quiet",  "empty",   "unchanged", "of_norms"};
static_assert(sizeof(Settings) == sizeof(kSettings));

// The names that are asked for, made once.
struct Names {
  PyObject* state = PyUnicode_InternFromString("__dict__");
  PyObject* call = PyUnicode_InternFromString("__call__");
  PyObject* forward = PyUnicode_InternFromString("forward");
  PyObject* parameters = PyUnicode_InternFromString("_parameters");
  PyObject* modules = PyUnicode_InternFromString("_modules");
  PyObject* weight = PyUnicode_InternFromString("weight");
  PyObject* bias = PyUnicode_InternFromString("bias");
  PyObject* training = PyUnicode_InternFromString("training");
  PyObject* eps = PyUnicode_InternFromString("eps");
  PyObject* normalized = PyUnicode_InternFromString("normalized_shape");
  PyObject* shape = PyUnicode_InternFromString("shape");
  PyObject* block_op = PyUnicode_InternFromString("residual_mlp");
  PyObject* approximate = PyUnicode_InternFromString("approximate");
  PyObject* dtype = PyUnicode_InternFromString("dtype");
  PyObject* get_device = PyUnicode_InternFromString("get_device");
  PyObject* requires_grad = PyUnicode_InternFromString("requires_grad");
  PyObject* op = PyUnicode_InternFromString("op");
  PyObject* packed = PyUnicode_InternFromString("packed");
  PyObject* order = PyUnicode_InternFromString("__mro__");
  PyObject* hooks[4] = {PyUnicode_InternFromString("_forward_hooks"), PyUnicode_InternFromString("_forward_pre_hooks"),
                        PyUnicode_InternFromString("_backward_hooks"),
                        PyUnicode_InternFromString("_backward_pre_hooks")};
};
const Names& names() {
  static const Names made;
  return made;
}

PyObject* class_of(PyObject* object) { return reinterpret_cast<PyObject*>(Py_TYPE(object)); }

// The answers: an error of Python's is a third one, and stays set.
enum Answer { kError = -1, kNo = 0, kYes = 1 };

Answer answer(bool yes) { return yes ? kYes : kNo; }

// Both the values of a dictionary that holds `key`, borrowed, and nullptr without an error where it does not.
PyObject* item(PyObject* dictionary, PyObject* key) { return PyDict_GetItemWithError(dictionary, key); }

Answer has_attribute(PyObject* owner, PyObject* name, PyObject* value) {
  const Owned found(PyObject_GetAttr(owner, name));
  return found ? answer(found.get() == value) : kError;
}

Answer are_unchanged(PyObject* triples) {
  const Py_ssize_t count = PyTuple_Size(triples);
  if (count < 0) return kError;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* triple = PyTuple_GetItem(triples, i);
    if (PyTuple_Size(triple) != 3) return kError;
    const Answer same =
        has_attribute(PyTuple_GetItem(triple, 0), PyTuple_GetItem(triple, 1), PyTuple_GetItem(triple, 2));
    if (same != kYes) return same;
  }
  return kYes;
}

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

// Whether calling a module with this __dict__ runs the forward of its class and nothing else.
Answer is_bare(PyObject* state) {
  for (PyObject* name : names().hooks) {
    PyObject* hooks = item(state, name);
    if (hooks == nullptr) return PyErr_Occurred() ? kError : kNo;
    const Py_ssize_t count = PyObject_Size(hooks);
    if (count != 0) return count < 0 ? kError : kNo;
  }
  if (item(state, names().forward) != nullptr) return kNo;
  return PyErr_Occurred() ? kError : kYes;
}

PyObject* state_of(PyObject* module) {
  PyObject* state = PyObject_GetAttr(module, names().state);
  if (state != nullptr && !PyDict_Check(state)) {
    Py_DECREF(state);
    PyErr_SetString(PyExc_TypeError, "module must be a torch.nn.Module");
    return nullptr;
  }
  return state;
}

// Sets an item of a new tuple to an object, which is borrowed.
Answer put(PyObject* tuple, Py_ssize_t place, PyObject* object) {
  Py_INCREF(object);
  return PyTuple_SetItem(tuple, place, object) == 0 ? kYes : kError;
}

// Puts the weight and the bias of a plain module of a class with both into a tuple.
Answer read_parameters(PyObject* kind, PyObject* state, PyObject* module, PyObject* operands, Py_ssize_t weight_place,
                       Py_ssize_t bias_place) {
  if (class_of(module) != kind) return kNo;
  const Answer bare = is_bare(state);
  if (bare != kYes) return bare;
  PyObject* parameters = item(state, names().parameters);
  if (parameters == nullptr || !PyDict_Check(parameters)) return PyErr_Occurred() ? kError : kNo;
  PyObject* weight = item(parameters, names().weight);
  if (weight == nullptr) return PyErr_Occurred() ? kError : kNo;
  PyObject* bias = item(parameters, names().bias);
  if (bias == nullptr) return PyErr_Occurred() ? kError : kNo;
  if (class_of(weight) != settings.parameter || (bias != Py_None && class_of(bias) != settings.parameter)) return kNo;
  const Answer there = put(operands, weight_place, weight);
  return there == kYes ? put(operands, bias_place, bias) : there;
}

Answer read_linear(PyObject* layer, PyObject* operands, Py_ssize_t weight_place, Py_ssize_t bias_place) {
  const Owned state(state_of(layer));
  if (!state) return kError;
  return read_parameters(settings.linear, state.get(), layer, operands, weight_place, bias_place);
}

// Whether hidden values come out as they go in: of dropout that is not training, or of a probability of 0.
Answer passes(PyObject* part) {
  if (PyFloat_Check(part)) return answer(PyFloat_AsDouble(part) == 0.0);
  if (class_of(part) != settings.dropout) return kNo;
  const Owned state(state_of(part));
  if (!state) return kError;
  PyObject* training = item(state.get(), names().training);
  if (training != Py_False) return PyErr_Occurred() ? kError : kNo;
  return is_bare(state.get());
}

Answer is_undisturbed() {
  for (Py_ssize_t i = 0, count = PyTuple_Size(settings.empty); i < count; ++i) {
    const Py_ssize_t size = PyObject_Size(PyTuple_GetItem(settings.empty, i));
    if (size != 0) return size < 0 ? kError : kNo;
  }
  for (Py_ssize_t i = 0, count = PyTuple_Size(settings.quiet); i < count; ++i) {
    const Owned said(PyObject_CallObject(PyTuple_GetItem(settings.quiet, i), nullptr));
    const int loud = said ? PyObject_IsTrue(said.get()) : -1;
    if (loud != 0) return loud < 0 ? kError : kNo;
  }
  return are_unchanged(settings.unchanged);
}

Answer truth(PyObject* object) {
  const int value = object == nullptr ? -1 : PyObject_IsTrue(object);
  return value < 0 ? kError : answer(value != 0);
}

Answer attribute_is_true(PyObject* owner, PyObject* name) { return truth(Owned(PyObject_GetAttr(owner, name)).get()); }

// Whether the compiled ops take a tensor, and are free to.
Answer are_for(PyObject* x) {
  if (class_of(x) != settings.tensor || PyObject_Size(settings.blocks) != 1) return kNo;
  const Answer there = attribute_is_true(x, settings.on_device);
  if (there != kYes) return there;
  const Owned dtype(PyObject_GetAttr(x, names().dtype));
  if (!dtype) return kError;
  const int known = PySequence_Contains(settings.dtypes, dtype.get());
  if (known != 1) return known < 0 ? kError : kNo;
  if (settings.refusal == Py_None) return kYes;
  const Owned index(PyObject_CallMethodObjArgs(x, names().get_device, nullptr));
  if (!index) return kError;
  const Owned refused(PyObject_CallFunctionObjArgs(settings.refusal, index.get(), nullptr));
  return refused ? answer(refused.get() == Py_None) : kError;
}

Answer is_recording() {
  const Answer enabled = truth(Owned(PyObject_CallObject(settings.is_grad_enabled, nullptr)).get());
  if (enabled != kYes) return enabled;
  const Answer inference = truth(Owned(PyObject_CallObject(settings.is_inference, nullptr)).get());
  return inference == kError ? kError : answer(inference == kNo);
}

// Whether autograd records a call on these operands, among which are tensors, numbers and None.
Answer is_recorded(PyObject* operands) {
  const Answer recording = is_recording();
  if (recording != kYes) return recording;
  Answer needs = kNo;
  for (Py_ssize_t i = 0, count = PyTuple_Size(operands); i < count && needs == kNo; ++i) {
    PyObject* operand = PyTuple_GetItem(operands, i);
    const bool tensor = class_of(operand) == settings.tensor || class_of(operand) == settings.parameter;
    if (tensor) needs = attribute_is_true(operand, names().requires_grad);
  }
  return needs;
}

// What is known of the class of an activation that is plain: the tuple, borrowed; nullptr without an error where it
// is not.
PyObject* known_activation(PyObject* act) {
  const bool gelu = class_of(act) == settings.gelu;
  PyObject* known = gelu ? nullptr : item(settings.known, class_of(act));
  if (known == nullptr && !gelu) return nullptr;
  const Owned state(state_of(act));
  if (!state) return nullptr;
  if (gelu) {
    PyObject* approximate = item(state.get(), names().approximate);
    known = approximate == nullptr ? nullptr : item(settings.known, approximate);
    if (known == nullptr) return nullptr;
  }
  const Answer plain[] = {has_attribute(class_of(act), names().forward, PyTuple_GetItem(known, 0)),
                          has_attribute(class_of(act), names().call, settings.call), is_bare(state.get()),
                          are_unchanged(PyTuple_GetItem(known, 2))};
  for (Answer said : plain) {
    if (said != kYes) return nullptr;
  }
  return known;
}

// What is around an MLP in its block: behind its last projection what may pass values on, a sum with the residual, and
// the norm, None where there is none.
struct Block {
  PyObject* behind;
  PyObject* residual;
  PyObject* residual_first;
  PyObject* norm;
  PyObject* norm_first;
};

// Puts weight, bias and eps of a plain nn.LayerNorm over the last dimension into a tuple, in this order.
Answer read_norm(PyObject* norm, PyObject* x, PyObject* operands, Py_ssize_t place) {
  const Owned state(state_of(norm));
  if (!state) return kError;
  const Answer read = read_parameters(settings.layer_norm, state.get(), norm, operands, place, place + 1);
  if (read != kYes) return read;
  const Answer unchanged = are_unchanged(settings.of_norms);
  if (unchanged != kYes) return unchanged;
  PyObject* eps = item(state.get(), names().eps);
  PyObject* normalized = item(state.get(), names().normalized);
  if (eps == nullptr || normalized == nullptr) return PyErr_Occurred() ? kError : kNo;
  if (!PyFloat_Check(eps) || !PyTuple_Check(normalized) || PyTuple_Size(normalized) != 1) return kNo;
  PyObject* weight = PyTuple_GetItem(operands, place);
  const Owned shape(PyObject_GetAttr(weight, names().shape));
  const int fits = shape ? PyObject_RichCompareBool(shape.get(), normalized, Py_EQ) : -1;
  if (fits != 1) return fits < 0 ? kError : kNo;
  const Owned dtype(PyObject_GetAttr(weight, names().dtype)), wanted(PyObject_GetAttr(x, names().dtype));
  if (!dtype || !wanted) return kError;
  return dtype.get() == wanted.get() ? put(operands, place + 2, eps) : kNo;
}

// Puts a block's residual, its order and its norm into a tuple, as the op has them from a place on.
Answer read_block(const Block& block, PyObject* x, PyObject* operands, Py_ssize_t place) {
  if (class_of(block.residual) != settings.tensor) return kNo;
  PyObject* const given[] = {block.residual, block.residual_first, Py_None, Py_None, Py_None, block.norm_first};
  for (PyObject* each : given) {
    if (put(operands, place++, each) != kYes) return kError;
  }
  return block.norm == Py_None ? kYes : read_norm(block.norm, x, operands, place - 4);
}

Answer pass(PyObject* parts) {
  for (Py_ssize_t i = 0, count = PyTuple_Size(parts); i < count; ++i) {
    const Answer said = passes(PyTuple_GetItem(parts, i));
    if (said != kYes) return said;
  }
  return kYes;
}

// The result, or the operands of the op where that is left to Python. nullptr is an error where one is set, else an
// answer: it is not known. With a block, the result is that of the block, and nothing is left.
PyObject* fused(PyObject* pattern, PyObject* x, PyObject* projections, PyObject* act, PyObject* between,
                const Block* block = nullptr) {
  const Answer taken = are_for(x);
  if (taken != kYes || is_undisturbed() != kYes) return nullptr;
  PyObject* known = known_activation(act);
  if (known == nullptr || pass(between) != kYes || (block != nullptr && pass(block->behind) != kYes)) return nullptr;
  // The op's arguments: x, weights, biases, code, and those of the block, which are of an MLP with two layers.
  const Py_ssize_t layers = PyTuple_Size(projections), plain = 2 * layers + 2;
  if (block != nullptr && layers != 2) return nullptr;
  Owned operands(PyTuple_New(block == nullptr ? plain : plain + 6));
  if (!operands) return nullptr;
  for (Py_ssize_t i = 0; i < layers; ++i) {
    if (read_linear(PyTuple_GetItem(projections, i), operands.get(), 1 + i, 1 + layers + i) != kYes) return nullptr;
  }
  PyObject* code = PyTuple_GetItem(known, 1);
  if (put(operands.get(), 0, x) != kYes || put(operands.get(), plain - 1, code) != kYes) return nullptr;
  if (block != nullptr && read_block(*block, x, operands.get(), plain) != kYes) return nullptr;
  const Answer packed = attribute_is_true(pattern, names().packed);
  const Answer recorded = packed == kNo ? is_recorded(operands.get()) : packed;
  if (recorded == kError || (recorded == kYes && block != nullptr)) return nullptr;
  if (recorded == kYes) return operands.release();
  const Owned name(PyObject_GetAttr(pattern, names().op));
  PyObject* op = name ? item(settings.ops, block == nullptr ? name.get() : names().block_op) : nullptr;
  if (op == nullptr) return nullptr;
  return PyObject_CallObject(op, operands.get());
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

// Whether a class has none of these attributes, which would hide children of the same names. To ask for one that is
// missing costs an exception, so that is asked once, and again where the class has got other bases or attributes.
Answer hides_none(PyObject* kind, PyObject* wanted) {
  const Owned order(PyObject_GetAttr(kind, names().order));
  if (!order) return kError;
  PyObject* known = item(settings.hiding_none, kind);
  if (known != nullptr && PyTuple_GetItem(known, 0) == wanted && PyTuple_GetItem(known, 1) == order.get()) {
    const Owned total(PyLong_FromSsize_t(total_size(PyTuple_GetItem(known, 2))));
    if (total && PyObject_RichCompareBool(PyTuple_GetItem(known, 3), total.get(), Py_EQ) == 1) return kYes;
  }
  for (Py_ssize_t i = 0, size = PyTuple_Size(wanted); i < size; ++i) {
    const Owned hidden(PyObject_GetAttr(kind, PyTuple_GetItem(wanted, i)));
    if (hidden) return kNo;
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return kError;
    PyErr_Clear();
  }
  const Owned dictionaries(dictionaries_of(order.get()));
  const Owned total(dictionaries ? PyLong_FromSsize_t(total_size(dictionaries.get())) : nullptr);
  if (!total || PyErr_Occurred()) return kError;
  const Owned entry(PyTuple_Pack(4, wanted, order.get(), dictionaries.get(), total.get()));
  return entry && PyDict_SetItem(settings.hiding_none, kind, entry.get()) == 0 ? kYes : kError;
}

// The children of a module under these names, as its attributes are found: a new tuple; nullptr where one is something
// else.
PyObject* children(PyObject* module, PyObject* state, PyObject* wanted) {
  PyObject* modules = item(state, names().modules);
  if (modules == nullptr || !PyDict_Check(modules)) return nullptr;
  if (hides_none(class_of(module), wanted) != kYes) return nullptr;
  const Py_ssize_t count = PyTuple_Size(wanted);
  Owned found(PyTuple_New(count));
  for (Py_ssize_t i = 0; found && i < count; ++i) {
    PyObject* name = PyTuple_GetItem(wanted, i);
    PyObject* child = item(modules, name);
    if (child == nullptr || item(state, name) != nullptr || PyErr_Occurred()) return nullptr;
    Py_INCREF(child);
    if (PyTuple_SetItem(found.get(), i, child) != 0) return nullptr;
  }
  return found.release();
}

// The half that calling a module runs, and nothing else: borrowed; nullptr where that is not known, or it has no names.
PyObject* running(PyObject* module, PyObject* state, PyObject* halves) {
  const Owned forward(PyObject_GetAttr(class_of(module), names().forward));
  PyObject* half = forward ? item(halves, forward.get()) : nullptr;
  if (half == nullptr || PyTuple_GetItem(half, 1) == Py_None) return nullptr;
  if (has_attribute(class_of(module), names().call, settings.call) != kYes || is_bare(state) != kYes) return nullptr;
  PyObject* written = PyTuple_GetItem(half, 0);
  if (forward.get() == written) return half;
  // Fused: is the forward of its class still the one that it was made from?
  const Owned original(PyObject_GetAttr(module, settings.original));
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
bool is_followed(PyObject* x) {
  return class_of(x) == settings.tensor && attribute_is_true(x, names().requires_grad) == kYes &&
         is_recording() == kYes;
}

// `rest` are the arguments of the tail behind its first one.
PyObject* joined(PyObject* heads, PyObject* tails, PyObject* owner, PyObject* halves, PyObject* x, PyObject* rest) {
  if (is_followed(x)) return nullptr;
  const Owned state(state_of(owner));
  const Owned both(state ? children(owner, state.get(), halves) : nullptr);
  if (!both) return nullptr;
  PyObject* tail = PyTuple_GetItem(both.get(), 0);
  PyObject* head = PyTuple_GetItem(both.get(), 1);
  const Owned tail_state(state_of(tail));
  const Owned head_state(tail_state ? state_of(head) : nullptr);
  if (!head_state) return nullptr;
  PyObject* first = running(head, head_state.get(), heads);
  PyObject* last = first == nullptr ? nullptr : running(tail, tail_state.get(), tails);
  if (last == nullptr) return nullptr;
  PyObject* of_head = PyTuple_GetItem(first, 1);
  const Owned starts(children(head, head_state.get(), PyTuple_GetItem(of_head, 1)));
  const Owned ends(starts ? children(tail, tail_state.get(), PyTuple_GetItem(last, 1)) : nullptr);
  if (!ends) return nullptr;
  // The head gave its activation and projections, the tail its projection, what hands values on, and its norm.
  PyObject* ending = PyTuple_GetItem(last, 2);
  const bool normed = ending != Py_None && PyObject_IsTrue(PyTuple_GetItem(ending, 0)) == 1;
  const Py_ssize_t count = PyTuple_Size(ends.get()) - normed;
  const Owned first_part(PyTuple_GetSlice(starts.get(), 1, PyTuple_Size(starts.get())));
  const Owned last_part(PyTuple_GetSlice(ends.get(), 0, 1));
  const Owned between(PyTuple_GetSlice(ends.get(), 1, count));
  if (!first_part || !last_part || !between) return nullptr;
  const Owned projections(PySequence_Concat(first_part.get(), last_part.get()));
  if (!projections) return nullptr;
  PyObject* act = PyTuple_GetItem(starts.get(), 0);
  PyObject* pattern = PyTuple_GetItem(of_head, 0);
  if (ending != Py_None && PyTuple_Size(rest) == 1) {
    const Owned nothing(PyTuple_New(0));
    if (!nothing) return nullptr;
    const Block block{nothing.get(), PyTuple_GetItem(rest, 0), PyTuple_GetItem(ending, 1),
                      normed ? PyTuple_GetItem(ends.get(), count) : Py_None, Py_False};
    PyObject* const whole = fused(pattern, x, projections.get(), act, between.get(), &block);
    if (whole != nullptr || !is_answer()) return whole;
  }
  const Owned result(fused(pattern, x, projections.get(), act, between.get()));
  if (!result || class_of(result.get()) != settings.tensor) return nullptr;  // or operands: the op is not called here
  return PyTuple_Pack(3, result.get(), last, tail);
}

PyObject* block_of(PyObject* wholes, PyObject* module, PyObject* x, const Block& block) {
  if (is_followed(x)) return nullptr;
  const Owned state(state_of(module));
  PyObject* half = state ? running(module, state.get(), wholes) : nullptr;
  if (half == nullptr) return nullptr;
  PyObject* names = PyTuple_GetItem(half, 1);
  const Owned parts(children(module, state.get(), PyTuple_GetItem(names, 1)));
  if (!parts) return nullptr;
  const Owned projections(PyTuple_GetSlice(parts.get(), 1, 3));
  const Owned between(PyTuple_GetSlice(parts.get(), 3, PyTuple_Size(parts.get())));
  if (!projections || !between) return nullptr;
  PyObject* act = PyTuple_GetItem(parts.get(), 0);
  return fused(PyTuple_GetItem(names, 0), x, projections.get(), act, between.get(), &block);
}

PyObject* boolean(Answer said) { return said == kError ? nullptr : PyBool_FromLong(said); }

// None for what is not known, or cannot be asked: the caller then asks in other ways, and says what is wrong.
PyObject* answered(PyObject* found) {
  if (found != nullptr || !is_answer()) return found;
  Py_RETURN_NONE;
}

PyObject* py_configure(PyObject*, PyObject* given) {
  if (!PyDict_Check(given)) return PyErr_Format(PyExc_TypeError, "settings must be a dict, got %R", class_of(given));
  Settings read{};
  PyObject** place = &read.tensor;
  for (const char* name : kSettings) {
    *place = PyDict_GetItemString(given, name);
    if (*place == nullptr) return PyErr_Format(PyExc_KeyError, "settings lack %s", name);
    Py_INCREF(*place++);
  }
  settings = read;
  Py_RETURN_NONE;
}

PyObject* py_is_bare(PyObject*, PyObject* module) {
  const Owned state(state_of(module));
  return state ? boolean(is_bare(state.get())) : nullptr;
}

PyObject* py_is_undisturbed(PyObject*, PyObject*) { return boolean(is_undisturbed()); }

PyObject* py_are_items(PyObject*, PyObject* given) {
  PyObject *dictionary, *pairs;
  if (!PyArg_ParseTuple(given, "O!O!", &PyDict_Type, &dictionary, &PyTuple_Type, &pairs)) return nullptr;
  return boolean(are_items(dictionary, pairs));
}

PyObject* py_is_recorded(PyObject*, PyObject* operands) {
  const Py_ssize_t count = PyTuple_Check(operands) ? PyTuple_Size(operands) : 0;
  if (count < 1) return PyErr_Format(PyExc_TypeError, "operands must be a tuple with an input, got %R", operands);
  bool plain = are_for(PyTuple_GetItem(operands, 0)) == kYes && is_undisturbed() == kYes;
  for (Py_ssize_t i = 1; plain && i < count; ++i) {
    PyObject* operand = PyTuple_GetItem(operands, i);
    plain = operand == Py_None || class_of(operand) == settings.parameter || class_of(operand) == settings.tensor;
  }
  return answered(plain ? boolean(is_recorded(operands)) : nullptr);
}

PyObject* py_are_unchanged(PyObject*, PyObject* triples) { return boolean(are_unchanged(triples)); }

PyObject* py_fused(PyObject*, PyObject* given) {
  PyObject *pattern, *x, *projections, *act, *between;
  if (!PyArg_ParseTuple(given, "OOO!OO!", &pattern, &x, &PyTuple_Type, &projections, &act, &PyTuple_Type, &between)) {
    return nullptr;
  }
  return answered(fused(pattern, x, projections, act, between));
}

PyObject* py_block(PyObject*, PyObject* given) {
  PyObject *pattern, *x, *projections, *act, *between;
  Block block{};
  if (!PyArg_ParseTuple(given, "OOO!OO!O!OOOO", &pattern, &x, &PyTuple_Type, &projections, &act, &PyTuple_Type,
                        &between, &PyTuple_Type, &block.behind, &block.residual, &block.residual_first, &block.norm,
                        &block.norm_first)) {
    return nullptr;
  }
  return answered(is_followed(x) ? nullptr : fused(pattern, x, projections, act, between, &block));
}

PyObject* py_block_of(PyObject*, PyObject* given) {
  PyObject *wholes, *module, *x;
  Block block{};
  if (!PyArg_ParseTuple(given, "O!OOO!OOOO", &PyDict_Type, &wholes, &module, &x, &PyTuple_Type, &block.behind,
                        &block.residual, &block.residual_first, &block.norm, &block.norm_first)) {
    return nullptr;
  }
  return answered(block_of(wholes, module, x, block));
}

PyObject* py_joined(PyObject*, PyObject* given) {
  PyObject *heads, *tails, *owner, *halves, *x, *rest;
  if (!PyArg_ParseTuple(given, "O!O!OO!OO!", &PyDict_Type, &heads, &PyDict_Type, &tails, &owner, &PyTuple_Type, &halves,
                        &x, &PyTuple_Type, &rest)) {
    return nullptr;
  }
  return answered(joined(heads, tails, owner, halves, x, rest));
}

}  // namespace

PyMethodDef plain_module_methods[] = {
    {"configure", py_configure, METH_O, nullptr},
    {"is_bare", py_is_bare, METH_O, nullptr},
    {"is_undisturbed", py_is_undisturbed, METH_NOARGS, nullptr},
    {"are_items", py_are_items, METH_VARARGS, nullptr},
    {"are_unchanged", py_are_unchanged, METH_O, nullptr},
    {"is_recorded", py_is_recorded, METH_O, nullptr},
    {"fused", py_fused, METH_VARARGS, nullptr},
    {"block", py_block, METH_VARARGS, nullptr},
    {"block_of", py_block_of, METH_VARARGS, nullptr},
    {"joined", py_joined, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace fused_mlp
