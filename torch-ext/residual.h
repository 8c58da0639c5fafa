#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "operands.h"
#include "torch_binding.h"

// The block that an MLP is part of, by a backend's layers and its LayerNorm.
namespace fused_mlp {

// Backend:
//   layers(x, fc1_weight, fc2_weight, fc1_bias, fc2_bias, activation)  both layers, or the second alone
//   norm(x, residual, weight, bias, eps, out)  LayerNorm of x + residual, or of x where residual is null; out may be x
//   sum(a, b)                                  as PyTorch adds and lays it out
template <typename Backend>
Tensor block(const Tensor& x, const OptionalTensor& fc1_weight, const Tensor& fc2_weight,
             const OptionalTensor& fc1_bias, const OptionalTensor& fc2_bias, int64_t activation, const Tensor& residual,
             bool residual_first, const OptionalTensor& norm_weight, const OptionalTensor& norm_bias,
             std::optional<double> eps, bool norm_first) {
  Tensor values = x;
  if (norm_first) {
    values = new_dense(x, x.sizes());
    const bool copied = !x.is_contiguous();
    if (copied) TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(values.get(), x.get(), 0));
    Backend::norm(copied ? values : x, nullptr, norm_weight, norm_bias, *eps, values);
  }
  values = Backend::layers(values, fc1_weight, fc2_weight, fc1_bias, fc2_bias, activation);
  if (eps && !norm_first) {
    Backend::norm(values, &residual, norm_weight, norm_bias, *eps, values);
    return values;
  }
  return residual_first ? Backend::sum(residual, values) : Backend::sum(values, residual);
}

}  // namespace fused_mlp
