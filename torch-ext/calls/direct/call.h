#pragma once

#include <functional>

#include "../../operands/dlpack.h"
#include "../../operands/packed.h"
#include "../../ops/norms/norm.h"
#include "registration.h"  // and with it Python.h

namespace fused_mlp {

// Places of an MLP's operands in the tuple that its op accepts: x, weights, biases (None for a missing one), the code
// of the activation, and with a block its other operands. If gate and up are packed, they share one weight and one
// bias. The tuple contains no quantised weights.
struct DirectForm {
  Py_ssize_t weights;
  bool gated, packed, up_first, block;
  const PackedWeight* quantised = nullptr;
};

// Inside a model, where the CPU caches are cold, torch's binding, dispatcher and boxed call cost an op some 12 us. A
// direct call bypasses them. It first checks that they would only call our kernels; otherwise, or if operands do not
// fit, the op runs. It reads tensors through DLPack's C exchange API.

// Sets torch.Tensor.__dlpack_c_exchange_api__, or None to disable direct calls; torch.Tensor.is_neg; torch.empty_like;
// and torch.autograd._profiler_enabled: under a profiler, calls use the dispatcher. Keeps references to all but the
// first.
bool configure_direct_calls(PyObject* exchange, PyObject* is_negated, PyObject* empty_like, PyObject* is_profiled);

// Returns the result; nullptr without an error if the op has to be called. The operands are of torch's own classes, and
// autograd does not record them.
PyObject* call_directly(const DirectForm& form, PyObject* operands);

// Returns the result of a standalone norm, given x, weight, bias (None for a missing one), eps, its code, and whether
// it rounds before the weight. Returns the operands if autograd records or torch's dispatcher has more to do; nullptr
// without an error if they do not fit.
PyObject* norm_or_operands(PyObject* operands, bool followed);

// For other direct calls:

// True if tensors can be read, and torch's dispatcher would only call our kernels.
bool may_call_directly();

// Reads a non-empty tensor whose memory holds its values as they are. False for any other; a Python error may then be
// set.
bool read_directly(PyObject* tensor, dlpack::Tensor* view);
// Like read_directly(), for a tensor of integers or codes: whether it is negated is not checked.
bool read_codes_directly(PyObject* tensor, dlpack::Tensor* view);
// Reads the sizes of such a tensor, in a tenth of the time of its methods. False, without an error, if those have to be
// called.
bool read_sizes(PyObject* tensor, dlpack::Tensor* view);
// Reads those of any tensor, which may lack memory of its own.
bool read_shape(PyObject* tensor, dlpack::Tensor* view);
bool read_dtype(const dlpack::Tensor& tensor, DType* dtype);
bool is_contiguous(const dlpack::Tensor& tensor);

// Reads the weight, the bias, eps and the code of a norm of rows like those of x; they begin at `place` in a tuple.
bool read_norm_directly(PyObject* operands, Py_ssize_t place, const dlpack::Tensor& x, Norm* norm);

// Returns a new tensor like x, with adjacent rows, that `compute` has written without the interpreter's lock; nullptr
// without an error if it returns false.
PyObject* computed_directly(PyObject* x, const std::function<bool(void*)>& compute);

}  // namespace fused_mlp
