#pragma once

#include <span>

#include "answers.h"
#include "quantized/packed_layer.h"

// The parts of an MLP as their modules hold them: whether each is plain, and its operands.
namespace fused_mlp {

using Objects = std::span<PyObject* const>;

// A few borrowed objects in sequence, cheaper than a tuple.
class Few {
 public:
  // False if there are more than any MLP has.
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

// True if a dictionary holds `pairs`: (name, value), or (name,) for a name that must be missing.
Answer are_items(PyObject* dictionary, PyObject* pairs);

// True if guards (models/parts/guards.py) hold for a module with this class and __dict__. Both are nullptr if the
// guards concern only attributes.
Answer hold(PyObject* guards, PyObject* kind, PyObject* state);

// True if calling a module with this __dict__ runs only the forward of its class, or, if `kernels`, a kernel's in its
// place. Without autograd recording, backward hooks are not checked, since torch then calls them to no effect.
Answer is_bare(PyObject* module, PyObject* state, bool recording, bool kernels = false);

// Returns the forward that a module with this __dict__ holds itself: inside accelerate's hook, if that only moves
// arguments to the device of the weights (models/reading/device_hooks.py). Borrowed; nullptr, without necessarily an
// error, if there is none.
PyObject* own_forward(PyObject* module, PyObject* state);

// True if a module with this __dict__ has hooks, or code that replaces its call.
Answer has_hooks(PyObject* state, bool recording);

// Returns the function of a method that is bound to a module, as a new reference; nullptr for anything else, without
// necessarily an error.
PyObject* bound_function(PyObject* method, PyObject* module);

// Returns the __dict__ of a module, borrowed from the module. Modules have a __getattr__, and this path avoids it.
PyObject* state_of(PyObject* module);

// Return the size of a tensor's first or last dimension; negative if a Python error is set, as for a tensor without
// dimensions. Under tracing the sizes are not numbers.
int64_t size_of_first(PyObject* tensor);
int64_t size_of_last(PyObject* tensor);

// Sets an item of a new tuple to a borrowed object.
inline Answer put(PyObject* tuple, Py_ssize_t place, PyObject* object) {
  Py_INCREF(object);
  return PyTuple_SetItem(tuple, place, object) == 0 ? kYes : kError;
}

// Returns the weight that a linear layer holds, borrowed; nullptr, without necessarily an error, if the layer's class
// is unknown or holds it elsewhere. Guards and hooks are not checked.
PyObject* held_weight(PyObject* layer);

// Puts the weight of a plain linear layer, as [out, in], and its bias into a tuple.
Answer read_linear(PyObject* layer, bool recording, PyObject* operands, Py_ssize_t weight_place, Py_ssize_t bias_place);

// Places of an adapter's operands in a tuple, from an offset on. The biases are None, and without an adapter a and b
// are None too.
enum AdapterPlace : Py_ssize_t { kA, kBiasOfA, kB, kBiasOfB, kScaling, kDropout, kAdapterPlaces };

// Like read_linear(), for a layer that may have PEFT LoRA adapters, in the common cases: none, one active, or all
// merged into the weight. Sets `*drops` if a dropout before an adapter is active; the answer is then kNo if the ops of
// this build do not support that. A quantised weight whose product has this dtype is appended to `quantised`.
Answer read_adapted(PyObject* layer, bool recording, PyObject* dtype, PyObject* operands, Py_ssize_t weight_place,
                    Py_ssize_t bias_place, PyObject* adapters, Py_ssize_t place, bool* drops, PackedWeights* quantised);

// Casts to the dtype of the following weight are functions; all other parts are modules or numbers.
bool is_cast(PyObject* part);

// True if these parts return the hidden values unchanged: dropout that is inactive or has probability 0, nn.Identity,
// and casts, whose dtypes fused() checks.
Answer all_pass(Objects parts, bool recording);

// Returns the entry of a plain activation in the table of known ones, a borrowed tuple; nullptr without an error if
// there is none.
PyObject* known_activation(PyObject* act, bool recording);

// Puts weight, bias, eps and code of a plain norm of this many features into a tuple, in this order. For norms other
// than torch's, the op itself checks the size of the weight. A known class has a tuple: (guards, code, name of eps or
// None, whether it is torch's, whether it has a bias, name of the weight, whether the normalised values are rounded
// before the weight, whether the weight may be float32 if x is not).
Answer read_norm(PyObject* norm, Py_ssize_t features, PyObject* dtype, bool recording, PyObject* operands,
                 Py_ssize_t place);

// Like read_norm(), for a norm that is being called: hooks are not checked.
Answer read_running_norm(PyObject* norm, Py_ssize_t features, PyObject* dtype, PyObject* operands, Py_ssize_t place);

// Returns the norm or scale after an MLP, None if there is none, borrowed; nullptr, without necessarily an error, if
// another part changes the values. Without a norm, one active dropout with a probability below 1 is allowed: `*dropped`
// is then its probability, borrowed.
PyObject* norm_behind(Objects parts, bool recording, PyObject** dropped);

// A module, whose children and own attributes are found by name, in Python's order, and the operands of a call, found
// by index.
class Owner {
 public:
  Answer open(PyObject* module, PyObject* state, PyObject* names);
  void give(PyObject* operands) { operands_ = operands; }
  // Borrowed; nullptr if a name refers to None or nothing. Anything but a name or index is returned as it is.
  PyObject* part(PyObject* given) const;
  bool is_in_eval() const;
  // False if one refers to None or nothing, or there are more than any MLP has.
  bool add_all(PyObject* given, Few* found) const;

 private:
  PyObject* state_ = nullptr;
  PyObject* modules_ = nullptr;
  PyObject* operands_ = nullptr;
};

// Reads the children of a module with these names.
Answer read_children(PyObject* module, PyObject* state, PyObject* names, Few* found);

}  // namespace fused_mlp
