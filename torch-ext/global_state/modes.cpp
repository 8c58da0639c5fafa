#include "modes.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "settings.h"

namespace fused_mlp {

Answer is_quiet() {
  for (Py_ssize_t i = 0, count = PyTuple_Size(settings.quiet); i < count; ++i) {
    const Answer loud = said_by(PyTuple_GetItem(settings.quiet, i));
    if (loud != kNo) return loud == kYes ? kNo : kError;
  }
  return kYes;
}

Answer is_undisturbed() {
  for (Py_ssize_t i = 0, count = PyTuple_Size(settings.empty); i < count; ++i) {
    const Py_ssize_t size = PyObject_Size(PyTuple_GetItem(settings.empty, i));
    if (size != 0) return size < 0 ? kError : kNo;
  }
  const Answer quiet = is_quiet();
  return quiet == kYes ? are_unchanged(settings.unchanged) : quiet;
}

PastModes::~PastModes() {
  if (context_ == nullptr) return;
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  const Owned left(PyObject_CallMethodObjArgs(context_, names().exit, Py_None, Py_None, Py_None, nullptr));
  if (!left) PyErr_WriteUnraisable(context_);
  PyErr_Restore(type, value, trace);
  Py_DECREF(context_);
}

Answer PastModes::pass() {
  PyObject* const modes = settings.modes;
  const Owned said(PyObject_CallObject(PyTuple_GetItem(modes, 0), nullptr));
  const Py_ssize_t count = said ? PyLong_AsSsize_t(said.get()) : -1;
  if (count <= 0) return count < 0 ? kError : kYes;
  for (Py_ssize_t i = 0; i < count; ++i) {
    const Owned index(PyLong_FromSsize_t(i));
    const Owned mode(index ? PyObject_CallFunctionObjArgs(PyTuple_GetItem(modes, 1), index.get(), nullptr) : nullptr);
    if (!mode) return kError;
    if (class_of(mode.get()) != PyTuple_GetItem(modes, 2)) return kNo;
  }
  Owned context(PyObject_CallObject(PyTuple_GetItem(modes, 3), nullptr));
  const Owned entered(context ? PyObject_CallMethodObjArgs(context.get(), names().enter, nullptr) : nullptr);
  if (!entered) return kError;
  context_ = context.release();
  return kYes;
}

static thread_local bool as_recorded = false;

AsRecorded::AsRecorded(PyObject* state) : before_(as_recorded) {
  as_recorded = state != nullptr && !aoti_torch_grad_mode_is_enabled() && item(state, names().training) == Py_True &&
                said_by(settings.is_inference) == kNo;
}

AsRecorded::~AsRecorded() { as_recorded = before_; }

bool is_as_recorded() { return as_recorded; }

Answer is_recording() {
  if (as_recorded) return kYes;
  if (!aoti_torch_grad_mode_is_enabled()) return kNo;
  const Answer inference = said_by(settings.is_inference);
  return inference == kError ? kError : answer(inference == kNo);
}

Answer is_autocasting() { return said_by(PyTuple_GetItem(settings.autocast, 0)); }

PyObject* autocast_dtype() {
  PyObject* const autocast = settings.autocast;
  if (is_autocasting() != kYes) return nullptr;
  PyObject* const device = PyTuple_GetItem(autocast, 3);
  const Owned enabled(PyObject_CallFunctionObjArgs(PyTuple_GetItem(autocast, 1), device, nullptr));
  if (truth(enabled.get()) != kYes) return nullptr;
  return PyObject_CallFunctionObjArgs(PyTuple_GetItem(autocast, 2), device, nullptr);
}

}  // namespace fused_mlp
