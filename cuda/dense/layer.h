// A layer on a GPU: one fused GEMM if the GPU's architecture has a suitable one, and otherwise torch's.
#pragma once

#include <vector>

#include "../../torch-ext/operands/activation.h"
#include "../../torch-ext/operands/matrix.h"
#include "../../torch-ext/operands/tensor_rows.h"
#include "../../torch-ext/torch_binding.h"
#include "../gemm/problem.h"

namespace fused_mlp {

inline constexpr auto kNoActivation = static_cast<int64_t>(Activation::kLinear);

// A linear layer, or a gated pair of them: act(x weight^T + bias), times (x up_weight^T + up_bias) if there is one.
struct Layer {
  const Tensor& weight;
  const Tensor* up_weight;
  const OptionalTensor& bias;
  const OptionalTensor& up_bias;
  int64_t activation;
};

inline const OptionalTensor kNoBias;

// Computes a layer.
Tensor apply_layer(const Tensor& x, const Layer& layer, const Place& place = {});

// Computes a layer, and another layer on its result.
Tensor apply_layers(const Tensor& x, const Layer& first, const Layer& second, const Place& place = {});

inline std::vector<int64_t> with_last_size(const Tensor& x, int64_t size) {
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = size;
  return sizes;
}

// Describes an operand to the kernels, if they can read its layout.
inline bool describe_weight(const Tensor& weight, Matrix* matrix) {
  if (weight.stride(1) != 1 && weight.size(1) != 1) return false;
  *matrix = {const_cast<void*>(weight.const_data_ptr()), weight.stride(0)};
  return true;
}

inline bool describe_bias(const OptionalTensor& bias, const void** data) {
  *data = bias.has_value() ? bias->const_data_ptr() : nullptr;
  return !bias.has_value() || bias->size(0) == 1 || bias->stride(0) == 1;
}

}  // namespace fused_mlp
