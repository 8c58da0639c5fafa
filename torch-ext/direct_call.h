#pragma once

#include "registration.h"  // and with it Python.h

namespace fused_mlp {

// How the operands of an MLP lie in the tuple that its op takes: x, weights, biases (None where there is none), the
// code of the activation, and with a block what is around the MLP. Where gate and up are packed, there is one weight
// and one bias for both.
struct DirectForm {
  Py_ssize_t weights;
  bool gated, packed, up_first, block;
};

// An op costs a model's call some 12 us inside of the model, where the processor's caches are cold, for torch's
// binding, dispatcher and boxed call. What they would do beside calling our kernel is asked for here, and where there
// is any of it, or the operands do not fit, the op has to be called. Tensors are read by DLPack's exchange API for C.

// Takes torch.Tensor.__dlpack_c_exchange_api__, or None for no direct calls; torch.Tensor.is_neg; and functions that
// return something true where a call has to go by the dispatcher. Keeps references to the latter two.
bool configure_direct_calls(PyObject* exchange, PyObject* is_negated, PyObject* dispatched);

// Returns the result; nullptr without an error where the op has to be called. The operands' classes are torch's own,
// and autograd does not follow them.
PyObject* call_directly(const DirectForm& form, PyObject* operands);

}  // namespace fused_mlp
