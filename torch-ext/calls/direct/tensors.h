#pragma once

#include <vector>

#include "../../torch_binding.h"
#include "registration.h"  // and with it Python.h

namespace fused_mlp {

// Tensors of Python's for functions of ops that are called past torch's dispatcher, by functions of torch that
// AOTInductor uses.

// Takes a tensor. False where it is none, or torch's dispatcher would do more with it than to hand it on to the ops of
// this build; an error of Python's may then be set. `seen`: it went through an op before, as what autograd saves.
bool take_tensor(PyObject* given, OptionalTensor* tensor, bool seen = false);

// A list of new tensors of Python's, of any but those that are not there; nullptr where an error of Python's is set.
PyObject* tensors_of(const std::vector<Tensor>& found);

}  // namespace fused_mlp
