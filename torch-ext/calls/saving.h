#pragma once

#include "registration.h"  // and with it Python.h

namespace fused_mlp {

// A function of the extension as a Python module.
//
//   save(ctx, saved, inputs, kept, needs, how, more) -> None
//     Sets the attributes of the `ctx` of an autograd node that its backward reads (autograd/training.py), as `saved`
//     says (autograd/nodes.py). `kept` are gate and up, `how` are further arguments of the gradients, and `more` is
//     saved after the operands. Leaf weights are saved as tensors separate from those that the module holds.
PyObject* py_save(PyObject*, PyObject* given);

}  // namespace fused_mlp
