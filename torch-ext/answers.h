#pragma once

#include "owned.h"

// Questions to Python's objects, for compiled code that asks many.
namespace fused_mlp {

inline PyObject* class_of(PyObject* object) { return reinterpret_cast<PyObject*>(Py_TYPE(object)); }

// The answers: an error of Python's is a third one, and stays set.
enum Answer { kError = -1, kNo = 0, kYes = 1 };

inline Answer answer(bool yes) { return yes ? kYes : kNo; }

// Both the values of a dictionary that holds `key`, borrowed, and nullptr without an error where it does not.
inline PyObject* item(PyObject* dictionary, PyObject* key) { return PyDict_GetItemWithError(dictionary, key); }

inline Answer has_attribute(PyObject* owner, PyObject* name, PyObject* value) {
  if (PyModule_Check(owner)) {  // its dictionary has all that was set, and is asked without its class
    PyObject* const held = item(PyModule_GetDict(owner), name);
    if (held != nullptr || PyErr_Occurred()) return held == nullptr ? kError : answer(held == value);
  }
  const Owned found(PyObject_GetAttr(owner, name));
  return found ? answer(found.get() == value) : kError;
}

inline Answer are_unchanged(PyObject* triples) {
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

inline Answer truth(PyObject* object) {
  const int value = object == nullptr ? -1 : PyObject_IsTrue(object);
  return value < 0 ? kError : answer(value != 0);
}

inline Answer attribute_is_true(PyObject* owner, PyObject* name) {
  return truth(Owned(PyObject_GetAttr(owner, name)).get());
}

inline Answer said_by(PyObject* function) { return truth(Owned(PyObject_CallObject(function, nullptr)).get()); }

}  // namespace fused_mlp
