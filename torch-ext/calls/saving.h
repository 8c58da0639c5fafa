#pragma once

#include "registration.h"  // and with it Python.h

namespace fused_mlp {

// A function of the extension as a Python module.
//
//   save(ctx, saved, inputs, kept, needs, how, more) -> None
//     Sets what the backward of a node of autograd reads of its `ctx` (autograd/training.py), as `saved` says
//     (autograd/nodes.py). `kept` are gate and up, `how` is what a gradient is told besides, and `more` is saved behind
//     the operands. Leaves among the weights are saved apart from what the module holds.
PyObject* py_save(PyObject*, PyObject* given);

}  // namespace fused_mlp
