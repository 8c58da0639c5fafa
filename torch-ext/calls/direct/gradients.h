#pragma once

#include "registration.h"  // and with it Python.h

namespace fused_mlp {

// Functions of the extension as a Python module: the backwards of nodes of autograd (autograd/), each given the node's
// ctx and the gradients that come in. They return those of all inputs, in a tuple, where all of them are asked for,
// nobody has to see how they are computed, and no hooks saw what the forward saved. Else None, and Python computes
// them; ctx.overwritten is True then where an op has failed that may have written to values of the node.
//
//   configure_backwards(is_batched, will_run, keeps_graph, references, no_tangents): functions of torch and Python that
//     the others ask, once; without them they give None
//   post_normed_backward(ctx, grad, sum_grad), pre_normed_backward(ctx, grad): blocks.py
//   recorded_backward(ctx, grad): training.py
//   projected_backward(ctx, *grads): attention.py
//   normed_backward(ctx, grad): norms.py
extern PyMethodDef gradient_methods[];

}  // namespace fused_mlp
