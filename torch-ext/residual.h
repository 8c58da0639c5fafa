#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "operands.h"
#include "torch_binding.h"

// The block that an MLP is part of, by a backend's layers and its LayerNorm.
namespace fused_mlp {

inline Tensor dense(const Tensor& source) {
  if (source.is_contiguous()) return source;
  const Tensor copy = new_dense(source, source.sizes());
  TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(copy.get(), source.get(), 0));
  return copy;
}

inline bool is_same(const Tensor& a, const Tensor& b) {
  const auto strides = a.strides(), others = b.strides();
  return a.const_data_ptr() == b.const_data_ptr() && std::equal(strides.begin(), strides.end(), others.begin());
}

// Backend:
//   layers(x, fc1_weight, fc2_weight, fc1_bias, fc2_bias, activation)  both layers, or the second alone
//   norm(x, residual, weight, bias, eps, out)  LayerNorm of x + residual, or of x where residual is null; out may be x
//   sum(a, b)                                  of tensors whose rows are adjacent
template <typename Backend>
Tensor block(const Tensor& x, const OptionalTensor& fc1_weight, const Tensor& fc2_weight,
             const OptionalTensor& fc1_bias, const OptionalTensor& fc2_bias, int64_t activation, const Tensor& residual,
             const OptionalTensor& norm_weight, const OptionalTensor& norm_bias, std::optional<double> eps,
             bool norm_first) {
  Tensor values = x, added = residual;
  if (norm_first) {
    const Tensor rows = dense(x);
    if (is_same(x, residual)) added = rows;  // a copy serves both
    values = new_dense(x, x.sizes());
    Backend::norm(rows, nullptr, norm_weight, norm_bias, *eps, values);
  }
  values = Backend::layers(values, fc1_weight, fc2_weight, fc1_bias, fc2_bias, activation);
  if (eps && !norm_first) {
    Backend::norm(values, &residual, norm_weight, norm_bias, *eps, values);
    return values;
  }
  return Backend::sum(values, dense(added));
}

}  // namespace fused_mlp
