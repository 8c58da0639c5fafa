#pragma once

#include <span>

#include "answers.h"
#include "quantized/packed_layer.h"

// The parts of an MLP as modules have them: whether each is plain, and what it holds.
namespace fused_mlp {

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

// True if a dictionary holds these: `pairs` are a name and a value, or a name alone where there must be none.
Answer are_items(PyObject* dictionary, PyObject* pairs);

// True if guards (models/parts/guards.py) hold for a module of this class with this __dict__; both are nullptr where
// the guards are of attributes alone.
Answer hold(PyObject* guards, PyObject* kind, PyObject* state);

// True if calling a module, which has this __dict__, runs the forward of its class, or where `kernels` that of a kernel
// in its place, and nothing else. Where autograd does not record, torch calls hooks of a backward for nothing: they are
// not asked for.
Answer is_bare(PyObject* module, PyObject* state, bool recording, bool kernels = false);

// True if a module with this __dict__ has hooks, or a call of its own.
Answer has_hooks(PyObject* state, bool recording);

// The function of a method that is bound to a module: a new reference; nullptr, which is no error in itself, for
// anything else.
PyObject* bound_function(PyObject* method, PyObject* module);

// The __dict__ of a module: borrowed, as the module holds it. Modules have a __getattr__, without which this is
// shorter.
PyObject* state_of(PyObject* module);

// The sizes of a tensor's first and last dimensions; negative where an error of Python's is set, as of a tensor without
// dimensions: where it is traced, these are no numbers.
int64_t size_of_first(PyObject* tensor);
int64_t size_of_last(PyObject* tensor);

// Sets an item of a new tuple to an object, which is borrowed.
inline Answer put(PyObject* tuple, Py_ssize_t place, PyObject* object) {
  Py_INCREF(object);
  return PyTuple_SetItem(tuple, place, object) == 0 ? kYes : kError;
}

// The weight that a linear layer holds: borrowed; nullptr, which is no error in itself, where the class of the layer is
// not known, or holds it otherwise. Guards and hooks are not asked.
PyObject* held_weight(PyObject* layer);

// Puts the weight of a plain linear layer, as [out, in], and its bias into a tuple.
Answer read_linear(PyObject* layer, bool recording, PyObject* operands, Py_ssize_t weight_place, Py_ssize_t bias_place);

// The operands of a layer's adapter in a tuple: from a place on these, of which biases are None, and where there is no
// adapter a and b too.
enum AdapterPlace : Py_ssize_t { kA, kBiasOfA, kB, kBiasOfB, kScaling, kDropout, kAdapterPlaces };

// The same of a layer that may have an adapter of PEFT's LoRA, in the common case: none, one that is active, or those
// that are merged into the weight. `*drops` becomes true where a dropout in front of an adapter is active; the answer
// is kNo then, if the ops of this build take none. A quantised weight, of a product of this dtype, is added to the
// others of the call.
Answer read_adapted(PyObject* layer, bool recording, PyObject* dtype, PyObject* operands, Py_ssize_t weight_place,
                    Py_ssize_t bias_place, PyObject* adapters, Py_ssize_t place, bool* drops, PackedWeights* quantised);

// Casts to the dtype of the weight behind them are functions; all other parts are modules or numbers.
bool is_cast(PyObject* part);

// True if hidden values come out of all these as they go in: of dropout that is not training, or has a probability of
// 0, of an nn.Identity, and of a cast, whose dtypes fused() looks at.
Answer all_pass(Objects parts, bool recording);

// The entry of a plain activation among those known: the tuple, borrowed; nullptr without an error where it
// is not.
PyObject* known_activation(PyObject* act, bool recording);

// Puts weight, bias, eps and code of a plain norm of so many features into a tuple, in this order. That the weight of
// one that is not torch's has as many the op itself asks. Its class is known by a tuple: (guards, code,
// name of eps or None, whether it is one of torch's, whether it has a bias, name of the weight, whether what is normed
// is rounded before the weight, whether that may be of float32 where x is not).
Answer read_norm(PyObject* norm, Py_ssize_t features, PyObject* dtype, bool recording, PyObject* operands,
                 Py_ssize_t place);

// The same of one that is being called: hooks are not asked for.
Answer read_running_norm(PyObject* norm, Py_ssize_t features, PyObject* dtype, PyObject* operands, Py_ssize_t place);

// The norm or scale that is behind an MLP, None where there is none: borrowed; nullptr, which is no error in itself,
// where another part does not pass values on. A single dropout that is active, of a probability below 1, is let
// through where there is no norm: `*dropped` is that probability then, borrowed.
PyObject* norm_behind(Objects parts, bool recording, PyObject** dropped);

// A module, whose children and own attributes are found by their names, as Python finds them, and the operands of a
// call, which are found by their indices.
class Owner {
 public:
  Answer open(PyObject* module, PyObject* state, PyObject* names);
  void give(PyObject* operands) { operands_ = operands; }
  // Borrowed; nullptr where a name stands for None or nothing. What is no name and no index stands for itself.
  PyObject* part(PyObject* given) const;
  bool is_in_eval() const;
  // False where one stands for None or nothing, or there are more than any MLP has.
  bool add_all(PyObject* given, Few* found) const;

 private:
  PyObject* state_ = nullptr;
  PyObject* modules_ = nullptr;
  PyObject* operands_ = nullptr;
};

// The children of a module under these names.
Answer read_children(PyObject* module, PyObject* state, PyObject* names, Few* found);

}  // namespace fused_mlp
