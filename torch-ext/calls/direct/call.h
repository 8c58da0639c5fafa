#pragma once

#include <functional>

#include "../../operands/dlpack.h"
#include "../../operands/packed.h"
#include "../../ops/norm.h"
#include "registration.h"  // and with it Python.h

namespace fused_mlp {

// The places of an MLP's operands in the tuple that its op takes: x, weights, biases (None where there is none), the
// code of the activation, and with a block what is around the MLP. Where gate and up are packed, there is one weight
// and one bias for both. In the place of weights that are quantised there is nothing in the tuple.
struct DirectForm {
  Py_ssize_t weights;
  bool gated, packed, up_first, block;
  const PackedWeight* quantised = nullptr;
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

// For other direct calls:

// True if tensors can be read, and torch's dispatcher would do nothing beside calling our kernels.
bool may_call_directly();

// Reads a tensor of memory that is as it looks, and not empty. False says that it is none; an error of Python's may
// then be set.
bool read_directly(PyObject* tensor, dlpack::Tensor* view);
// The same of a tensor of integers, or codes: nobody asks if it is as it looks.
bool read_codes_directly(PyObject* tensor, dlpack::Tensor* view);
// The sizes of such a tensor, which takes a tenth of the time of its methods. False, without an error, where they have
// to be called.
bool read_sizes(PyObject* tensor, dlpack::Tensor* view);
// Those of any tensor, whose memory may be held by others.
bool read_shape(PyObject* tensor, dlpack::Tensor* view);
bool read_dtype(const dlpack::Tensor& tensor, DType* dtype);
bool is_contiguous(const dlpack::Tensor& tensor);

// Reads the weight, the bias, eps and the code of a norm of rows like those of x from a place on in a tuple.
bool read_norm_directly(PyObject* operands, Py_ssize_t place, const dlpack::Tensor& x, Norm* norm);

// A new tensor like x, whose rows are adjacent, into which `compute` has written, without the interpreter's lock;
// nullptr without an error where it says that it has not.
PyObject* computed_directly(PyObject* x, const std::function<bool(void*)>& compute);

}  // namespace fused_mlp
