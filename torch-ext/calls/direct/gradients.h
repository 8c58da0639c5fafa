#pragma once

#include "registration.h"  // and with it Python.h

namespace fused_mlp {

// Functions of the extension as a Python module: the backwards of autograd nodes (autograd/), each given the node's ctx
// and the incoming gradients. They return the gradients of all inputs in a tuple, if all are needed, nothing has to
// observe their computation, and no hooks saw what the forward saved. Otherwise they return None, and Python computes
// them; ctx.overwritten is then True if an op failed that may have written to values of the node.
//
//   configure_backwards(is_batched, will_run, keeps_graph, references, no_tangents): sets, once, the functions of torch
//     and Python that the others call; without them they return None
//   post_normed_backward(ctx, grad, sum_grad), pre_normed_backward(ctx, grad): blocks.py
//   recorded_backward(ctx, grad): training.py
//   projected_backward(ctx, *grads): attention.py
//   normed_backward(ctx, grad): norms.py
extern PyMethodDef gradient_methods[];

}  // namespace fused_mlp
