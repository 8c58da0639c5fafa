#pragma once

#include "registration.h"  // and with it Python.h

namespace fused_mlp {

// Functions of the extension as a Python module, each under the name of an op of training (torch_binding.h) and with
// its operands in order. They call it past torch's dispatcher, with the tensors themselves, where nothing would see the
// call there: no mode, no transform, no trace, no profiler, and plain tensors on the op's device. Else they call the op
// of `Settings::ops`. Results come as a list. Four more give None where ops are to be called: packed_adapted_forward
// and packed_adapted_backward, over quantised weights; and two that compute a block by two of the ops:
// pre_normed_forward gives the sum, the norm of x and its statistics, gate, up; post_normed_forward y, gate, up, the
// sum, the statistics, and the mask of a dropout.
extern PyMethodDef direct_op_methods[];

}  // namespace fused_mlp
