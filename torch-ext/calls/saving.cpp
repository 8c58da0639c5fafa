#include "saving.h"

#include "../global_state/settings.h"
#include "answers.h"
#include "direct/call.h"
#include "parts.h"

namespace fused_mlp {
namespace {

constexpr Py_ssize_t kOperands = 7, kFirstWeight = 1, kLastWeight = 3;

// The fields of Saved (autograd/nodes.py).
enum Field : Py_ssize_t { kPlaces = 1, kGate, kUp, kLost };

// Returns a leaf weight as another tensor that shares only its memory. If its `data` is replaced before the backward,
// gradients still use the weight that was multiplied, as those of a linear layer do.
PyObject* apart(PyObject* operand, Py_ssize_t place) {
  const bool weight = kFirstWeight <= place && place <= kLastWeight && operand != Py_None;
  const Answer leaf = weight ? attribute_is_true(operand, names().is_leaf) : kNo;
  if (leaf == kError) return nullptr;
  if (leaf == kYes) return PyObject_CallMethodObjArgs(operand, names().detach, nullptr);
  Py_INCREF(operand);
  return operand;
}

// Returns the bits of gradients whose columns are adjacent: none if all their inputs are contiguous.
PyObject* layout(PyObject* inputs, PyObject* needs) {
  for (Py_ssize_t i = 0; i < kLastWeight; ++i) {  // x and the weights of the first layer
    if (PyTuple_GetItem(needs, i) != Py_True) continue;
    dlpack::Tensor view;
    const bool dense = read_sizes(PyTuple_GetItem(inputs, i), &view) && is_contiguous(view);
    if (!dense) return PyObject_CallFunctionObjArgs(settings.layout, inputs, needs, nullptr);
  }
  return PyLong_FromSsize_t(0);
}

// Returns stand-ins for lost operands; leaves need none.
PyObject* edges(PyObject* inputs, PyObject* lost) {
  for (Py_ssize_t i = 0; i < PyTuple_Size(lost); ++i) {
    PyObject* const operand = PyTuple_GetItem(inputs, PyLong_AsSsize_t(PyTuple_GetItem(lost, i)));
    const Answer leaf = operand == nullptr ? kError : attribute_is_true(operand, names().is_leaf);
    if (leaf == kNo) return PyObject_CallFunctionObjArgs(settings.edges, inputs, lost, nullptr);
    if (leaf == kError) return nullptr;
  }
  static PyObject* const none = PyDict_New();  // never written to
  Py_XINCREF(none);
  return none;
}

// Puts a new reference, which may be null, into a tuple.
bool give(PyObject* tuple, Py_ssize_t place, PyObject* object) {
  return object != nullptr && PyTuple_SetItem(tuple, place, object) == 0;
}

bool set(PyObject* ctx, PyObject* name, const Owned& value) {
  return value && PyObject_SetAttr(ctx, name, value.get()) == 0;
}

}  // namespace

PyObject* py_save(PyObject*, PyObject* given) {
  constexpr Py_ssize_t kArguments = 7;
  PyObject* of[kArguments];
  bool fits = PyTuple_Size(given) == kArguments;
  for (Py_ssize_t i = 0; fits && i < kArguments; ++i) {
    of[i] = PyTuple_GetItem(given, i);
    fits = i == 0 || PyTuple_Check(of[i]);
  }
  if (!fits) return PyErr_Format(PyExc_ValueError, "save() takes a ctx and six tuples, got %R", given);
  PyObject *const ctx = of[0], *const saved = of[1], *const inputs = of[2], *const kept = of[3], *const more = of[6];

  const Owned own(PyTuple_New(2));
  for (Py_ssize_t i = 0; i < 2; ++i) {
    const bool there =
        PyTuple_GetItem(saved, kGate + i) == Py_True && (i == 0 || PyTuple_GetItem(inputs, 2) != Py_None);
    if (!own || put(own.get(), i, there ? PyTuple_GetItem(kept, i) : Py_None) != kYes) return nullptr;
  }
  // Without hooks on saved tensors, the node itself owns the kept values.
  const Owned hooks(PyObject_CallFunctionObjArgs(settings.saved_tensors_hooks, Py_False, nullptr));
  if (!hooks) return nullptr;
  const bool shown = hooks.get() != Py_None;
  const Py_ssize_t shift = kOperands + (shown ? 2 : 0);
  const Owned to_save(PyTuple_New(shift + PyTuple_Size(more)));
  for (Py_ssize_t i = 0; to_save && i < kOperands; ++i) {
    const Py_ssize_t place = PyLong_AsSsize_t(PyTuple_GetItem(PyTuple_GetItem(saved, kPlaces), i));
    if (!give(to_save.get(), i, apart(place < 0 ? Py_None : PyTuple_GetItem(inputs, place), place))) return nullptr;
  }
  for (Py_ssize_t i = kOperands; to_save && i < PyTuple_Size(to_save.get()); ++i) {
    PyObject* const each = i < shift ? PyTuple_GetItem(own.get(), i - kOperands) : PyTuple_GetItem(more, i - shift);
    if (put(to_save.get(), i, each) != kYes) return nullptr;
  }
  const Owned how(PyTuple_New(PyTuple_Size(of[5]) + 1));
  for (Py_ssize_t i = 0; how && i < PyTuple_Size(of[5]); ++i) {
    if (put(how.get(), i, PyTuple_GetItem(of[5], i)) != kYes) return nullptr;
  }
  if (!to_save || !how || !give(how.get(), PyTuple_Size(of[5]), layout(inputs, of[4]))) return nullptr;
  // Set the attributes that set_materialize_grads() and save_for_backward() set.
  const bool done = PyObject_SetAttr(ctx, names().how, how.get()) == 0 &&
                    set(ctx, names().edges, Owned(edges(inputs, PyTuple_GetItem(saved, kLost)))) &&
                    PyObject_SetAttr(ctx, names().materialize_grads, Py_False) == 0 &&
                    PyObject_SetAttr(ctx, names().to_save, to_save.get()) == 0 &&
                    PyObject_SetAttr(ctx, names().own, shown ? Py_None : own.get()) == 0;
  if (!done) return nullptr;
  Py_RETURN_NONE;
}

}  // namespace fused_mlp
