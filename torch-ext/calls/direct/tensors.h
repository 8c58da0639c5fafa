#pragma once

#include <vector>

#include "../../torch_binding.h"
#include "registration.h"  // and with it Python.h

namespace fused_mlp {

// Python tensors as operands and results of ops that are called past torch's dispatcher, through torch functions that
// AOTInductor uses.

// Reads a tensor. False if it is not one, or torch's dispatcher would do more than pass it to the ops of this build; a
// Python error may then be set. `seen`: it went through an op before, as values saved by autograd have.
bool take_tensor(PyObject* given, OptionalTensor* tensor, bool seen = false);

// Returns a list of new Python tensors; none may be missing. nullptr if a Python error is set.
PyObject* tensors_of(const std::vector<Tensor>& found);

}  // namespace fused_mlp
