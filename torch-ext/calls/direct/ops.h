#pragma once

#include "registration.h"  // and with it Python.h

namespace fused_mlp {

// Functions of the extension as a Python module, each with the name and the operands of a training op
// (torch_binding.h). They call it past torch's dispatcher, with the tensors themselves, if nothing would observe the
// call there: no mode, transform, trace or profiler, and plain tensors on the op's device. Otherwise they call the op
// of `Settings::ops`. Results come as a list. Four more return None if ops have to be called: packed_adapted_forward
// and packed_adapted_backward, over quantised weights; and two that compute a block with two of the ops.
// pre_normed_forward returns the sum, the norm of x and its statistics, gate, up; post_normed_forward returns y, gate,
// up, the sum, the statistics, and the mask of a dropout.
extern PyMethodDef direct_op_methods[];

}  // namespace fused_mlp
