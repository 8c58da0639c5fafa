#pragma once

#include <exception>

#include "../operands/owned.h"

// Checks on Python objects, for compiled code that runs many of them.
namespace fused_mlp {

inline PyObject* class_of(PyObject* object) { return reinterpret_cast<PyObject*>(Py_TYPE(object)); }

// Results of checks. An error set in Python is the third one, and stays set: nothing more is looked up before it is
// returned, because Python clears it if a look-up misses the cache of types.
enum Answer { kError = -1, kNo = 0, kYes = 1 };

inline Answer answer(bool yes) { return yes ? kYes : kNo; }

// Returns the value of `key` in a dictionary, borrowed; nullptr without an error if it is missing.
inline PyObject* item(PyObject* dictionary, PyObject* key) { return PyDict_GetItemWithError(dictionary, key); }

// A dictionary owner holds a function's global names.
inline Answer has_attribute(PyObject* owner, PyObject* name, PyObject* value) {
  const bool names = PyDict_Check(owner);
  if (names || PyModule_Check(owner)) {  // a module's dictionary has all that was set; its class is not needed
    PyObject* const held = item(names ? owner : PyModule_GetDict(owner), name);
    if (held != nullptr || names || PyErr_Occurred()) return PyErr_Occurred() ? kError : answer(held == value);
  }
  const Owned found(PyObject_GetAttr(owner, name));
  return found ? answer(found.get() == value) : kError;
}

// Each is (owner, name, value), or (dictionary, name) for a name that must be missing.
inline Answer are_unchanged(PyObject* attributes) {
  const Py_ssize_t count = PyTuple_Size(attributes);
  if (count < 0) return kError;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* const attribute = PyTuple_GetItem(attributes, i);
    const Py_ssize_t size = PyTuple_Size(attribute);
    PyObject* const owner = size < 2 ? nullptr : PyTuple_GetItem(attribute, 0);
    if (size != 3 && (size != 2 || !PyDict_Check(owner))) {
      PyErr_SetString(PyExc_TypeError, "attributes must be triples of an owner, a name and a value");
      return kError;
    }
    PyObject* const name = PyTuple_GetItem(attribute, 1);
    const Answer same = size == 3 ? has_attribute(owner, name, PyTuple_GetItem(attribute, 2))
                                  : answer(item(owner, name) == nullptr && PyErr_Occurred() == nullptr);
    if (same != kYes) return same;
  }
  return kYes;
}

inline Answer truth(PyObject* object) {
  const int value = object == nullptr ? -1 : PyObject_IsTrue(object);
  return value < 0 ? kError : answer(value != 0);
}

inline Answer attribute_is_true(PyObject* owner, PyObject* name) {
  return truth(Owned(PyObject_GetAttr(owner, name)).get());
}

inline Answer said_by(PyObject* function) { return truth(Owned(PyObject_CallObject(function, nullptr)).get()); }

// True if no error is set except one that means that something cannot be checked or computed here; it is cleared. The
// normal path reports what is wrong, or computes it.
inline bool is_answer() {
  PyObject* const meant[] = {PyExc_AttributeError, PyExc_BufferError, PyExc_IndexError, PyExc_RuntimeError,
                             PyExc_TypeError};
  for (PyObject* error : meant) {
    if (PyErr_Occurred() && PyErr_ExceptionMatches(error)) PyErr_Clear();
  }
  return PyErr_Occurred() == nullptr;
}

// Runs a C++ function. If it throws, sets a Python error and returns false.
template <typename Function>
bool succeeds(const Function& function) {
  try {
    function();
    return true;
  } catch (const std::exception& thrown) {
    PyErr_SetString(PyExc_RuntimeError, thrown.what());
    return false;
  }
}

// Releases the interpreter's lock, as torch does for its ops.
class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;
  ~Unlocked() { PyEval_RestoreThread(state_); }

 private:
  PyThreadState* state_;
};

// Functions that Python calls with an argument or a tuple of them. They return only through these two: an error that is
// set overrides the returned value.

// None means unknown, or that the check cannot run.
template <PyObject* (*kFind)(PyObject*)>
PyObject* answered(PyObject*, PyObject* given) {
  Owned found(kFind(given));
  const bool failed = PyErr_Occurred() != nullptr;
  if (failed && !is_answer()) return nullptr;
  if (!failed && found) return found.release();
  Py_RETURN_NONE;
}

template <Answer (*kAsk)(PyObject*)>
PyObject* boolean(PyObject*, PyObject* given) {
  const Answer said = kAsk(given);
  return said == kError || PyErr_Occurred() ? nullptr : PyBool_FromLong(said);
}

}  // namespace fused_mlp
