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

// Set once, by configure(), and never given back: they are torch's own, which live as long as the process.
PyObject *linear_class, *parameter_class, *dropout_class, *module_call, *quiet_functions, *empty_dictionaries,
    *unchanged_attributes;

// The names that are asked for, made once.
struct Names {
  PyObject* state = PyUnicode_InternFromString("__dict__");
  PyObject* call = PyUnicode_InternFromString("__call__");
  PyObject* forward = PyUnicode_InternFromString("forward");
  PyObject* parameters = PyUnicode_InternFromString("_parameters");
  PyObject* weight = PyUnicode_InternFromString("weight");
  PyObject* bias = PyUnicode_InternFromString("bias");
  PyObject* training = PyUnicode_InternFromString("training");
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

// Puts the weight and the bias of a plain linear layer into a tuple; its places are filled with new references.
Answer read_linear(PyObject* layer, PyObject* operands, Py_ssize_t place, Py_ssize_t layers) {
  if (class_of(layer) != linear_class) return kNo;
  const Owned state(state_of(layer));
  if (!state) return kError;
  const Answer bare = is_bare(state.get());
  if (bare != kYes) return bare;
  PyObject* parameters = item(state.get(), names().parameters);
  if (parameters == nullptr || !PyDict_Check(parameters)) return PyErr_Occurred() ? kError : kNo;
  PyObject* weight = item(parameters, names().weight);
  if (weight == nullptr) return PyErr_Occurred() ? kError : kNo;
  PyObject* bias = item(parameters, names().bias);
  if (bias == nullptr) return PyErr_Occurred() ? kError : kNo;
  if (class_of(weight) != parameter_class || (bias != Py_None && class_of(bias) != parameter_class)) return kNo;
  Py_INCREF(weight);
  Py_INCREF(bias);
  const bool stored =
      PyTuple_SetItem(operands, place, weight) == 0 && PyTuple_SetItem(operands, layers + place, bias) == 0;
  return stored ? kYes : kError;
}

// Whether hidden values come out as they go in: of dropout that is not training, or of a probability of 0.
Answer passes(PyObject* part) {
  if (PyFloat_Check(part)) return answer(PyFloat_AsDouble(part) == 0.0);
  if (class_of(part) != dropout_class) return kNo;
  const Owned state(state_of(part));
  if (!state) return kError;
  PyObject* training = item(state.get(), names().training);
  if (training != Py_False) return PyErr_Occurred() ? kError : kNo;
  return is_bare(state.get());
}

Answer is_plain_activation(PyObject* act, PyObject* forward) {
  const Answer own = has_attribute(class_of(act), names().forward, forward);
  if (own != kYes) return own;
  const Answer called = has_attribute(class_of(act), names().call, module_call);
  if (called != kYes) return called;
  const Owned state(state_of(act));
  return state ? is_bare(state.get()) : kError;
}

Answer is_undisturbed() {
  if (quiet_functions == nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "configure() was not called");
    return kError;
  }
  for (Py_ssize_t i = 0, count = PyTuple_Size(empty_dictionaries); i < count; ++i) {
    const Py_ssize_t size = PyObject_Size(PyTuple_GetItem(empty_dictionaries, i));
    if (size != 0) return size < 0 ? kError : kNo;
  }
  for (Py_ssize_t i = 0, count = PyTuple_Size(quiet_functions); i < count; ++i) {
    const Owned said(PyObject_CallObject(PyTuple_GetItem(quiet_functions, i), nullptr));
    const int loud = said ? PyObject_IsTrue(said.get()) : -1;
    if (loud != 0) return loud < 0 ? kError : kNo;
  }
  return are_unchanged(unchanged_attributes);
}

// All of operands() but the surroundings, into a tuple of two places for each layer.
Answer read(PyObject* projections, PyObject* act, PyObject* forward, PyObject* unchanged, PyObject* between,
            PyObject* operands) {
  const Py_ssize_t layers = PyTuple_Size(projections);
  for (Py_ssize_t i = 0; i < layers; ++i) {
    const Answer plain = read_linear(PyTuple_GetItem(projections, i), operands, i, layers);
    if (plain != kYes) return plain;
  }
  const Answer known = is_plain_activation(act, forward);
  if (known != kYes) return known;
  for (Py_ssize_t i = 0, count = PyTuple_Size(between); i < count; ++i) {
    const Answer same = passes(PyTuple_GetItem(between, i));
    if (same != kYes) return same;
  }
  return are_unchanged(unchanged);
}

PyObject* boolean(Answer said) { return said == kError ? nullptr : PyBool_FromLong(said); }

PyObject* py_configure(PyObject*, PyObject* given) {
  PyObject *linear, *parameter, *dropout, *call, *quiet, *empty, *unchanged;
  if (!PyArg_ParseTuple(given, "OOOOO!O!O!", &linear, &parameter, &dropout, &call, &PyTuple_Type, &quiet,
                        &PyTuple_Type, &empty, &PyTuple_Type, &unchanged)) {
    return nullptr;
  }
  PyObject* const kept[] = {linear, parameter, dropout, call, quiet, empty, unchanged};
  for (PyObject* object : kept) Py_INCREF(object);
  linear_class = linear, parameter_class = parameter, dropout_class = dropout, module_call = call;
  quiet_functions = quiet, empty_dictionaries = empty, unchanged_attributes = unchanged;
  Py_RETURN_NONE;
}

PyObject* py_is_bare(PyObject*, PyObject* module) {
  const Owned state(state_of(module));
  return state ? boolean(is_bare(state.get())) : nullptr;
}

PyObject* py_is_undisturbed(PyObject*, PyObject*) { return boolean(is_undisturbed()); }

PyObject* py_operands(PyObject*, PyObject* given) {
  PyObject *projections, *act, *forward, *unchanged, *between;
  if (!PyArg_ParseTuple(given, "O!OOO!O!", &PyTuple_Type, &projections, &act, &forward, &PyTuple_Type, &unchanged,
                        &PyTuple_Type, &between)) {
    return nullptr;
  }
  Answer said = is_undisturbed();
  if (said == kError) return nullptr;
  if (said == kNo) Py_RETURN_NONE;
  Owned operands(PyTuple_New(2 * PyTuple_Size(projections)));
  if (!operands) return nullptr;
  said = read(projections, act, forward, unchanged, between, operands.get());
  if (said == kError) return nullptr;
  if (said == kNo) Py_RETURN_NONE;
  return operands.release();
}

}  // namespace

PyMethodDef plain_module_methods[] = {
    {"configure", py_configure, METH_VARARGS, nullptr},
    {"is_bare", py_is_bare, METH_O, nullptr},
    {"is_undisturbed", py_is_undisturbed, METH_NOARGS, nullptr},
    {"operands", py_operands, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace fused_mlp
