#pragma once

#include "registration.h"  // and with it Python.h

namespace fused_mlp {

// The places of an MLP's operands in the tuple that its op takes: x, weights, biases (None where there is none), the
// code of the activation, and with a block what is around the MLP. Where gate and up are packed, there is one weight
// and one bias for both.
struct DirectForm {
  Py_ssize_t weights;
  bool gated, packed, up_first, block;
};

// Inside of a model, where the processor's caches are cold, torch's binding, dispatcher and boxed call cost an op some
// 12 us. A direct call goes past them. It checks first whether they would do anything beside calling our kernels, and
// leaves such a call, or one whose operands do not fit, to the op. It reads tensors by DLPack's exchange API for C.

// Takes torch.Tensor.__dlpack_c_exchange_api__, or None for no direct calls; torch.Tensor.is_neg; torch.empty_like; and
// torch.autograd._profiler_enabled: what is profiled goes by the dispatcher. Keeps references to all but the first.
bool configure_direct_calls(PyObject* exchange, PyObject* is_negated, PyObject* empty_like, PyObject* is_profiled);

// Returns the result; nullptr without an error where the op has to be called. The operands' classes are torch's own,
// and autograd does not follow them.
PyObject* call_directly(const DirectForm& form, PyObject* operands);

// The result of a norm by itself, given x, weight, bias (None where there is none), eps, its code, and whether it is
// rounded before the weight. Where autograd follows, or torch's dispatcher has more to do, the operands again; nullptr
// without an error where these do not fit.
PyObject* norm_or_operands(PyObject* operands, bool followed);

}  // namespace fused_mlp
