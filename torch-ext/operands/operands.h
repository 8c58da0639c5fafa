#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "../ops/norms/norm.h"
#include "../torch_binding.h"
#include "activation.h"
#include "tensor_rows.h"

// Checks of operands that the ops of every backend share, and the allocation of result tensors.
namespace fused_mlp {

inline void check_activation(int64_t activation) {
  STD_TORCH_CHECK(visit_activation(activation, []<Activation>() {}), "activation must be a code of activation.h, not ",
                  activation);
}

// `like` is the operand that determines the dtype and the device of all.
inline void check_same_kind(const Tensor& operand, const char* name, const Tensor& like) {
  STD_TORCH_CHECK(operand.scalar_type() == like.scalar_type(), name, " differs in dtype from the first operand");
  STD_TORCH_CHECK(operand.device() == like.device(), name, " is not on the device of the first operand");
}

inline void check_bias(const OptionalTensor& bias, const char* name, const Tensor& weight, const Tensor& x) {
  if (!bias.has_value()) return;
  check_same_kind(*bias, name, x);
  STD_TORCH_CHECK(bias->dim() == 1 && bias->size(0) == weight.size(0), name, " must be [out], out as in its weight");
}

inline void check_weight(const Tensor& weight, const char* name, int64_t in_features, const Tensor& x) {
  check_same_kind(weight, name, x);
  STD_TORCH_CHECK(weight.dim() == 2 && weight.size(1) == in_features, name, " must be [out, in], in being ",
                  in_features);
}

inline void check_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  STD_TORCH_CHECK(x.dim() > 0, "x must be [..., in]");
  check_weight(weight, "weight", x.size(-1), x);
  check_bias(bias, "bias", weight, x);
}

inline void check_gated_linear(const Tensor& x, const Tensor& gate_weight, const Tensor& up_weight,
                               const OptionalTensor& gate_bias, const OptionalTensor& up_bias) {
  check_linear(x, gate_weight, gate_bias);
  check_linear(x, up_weight, up_bias);
  STD_TORCH_CHECK(gate_weight.size(0) == up_weight.size(0), "up_weight must have the shape of gate_weight");
}

// The second layer of an MLP, whose input is the first one's result.
inline void check_second(const Tensor& x, const Tensor& first_weight, const Tensor& weight,
                         const OptionalTensor& bias) {
  check_weight(weight, "the second layer's weight", first_weight.size(0), x);
  check_bias(bias, "the second layer's bias", weight, x);
}

inline void check_same_shape(const Tensor& operand, const char* name, const Tensor& like) {
  check_same_kind(operand, name, like);
  const auto sizes = operand.sizes(), expected = like.sizes();
  STD_TORCH_CHECK(std::equal(sizes.begin(), sizes.end(), expected.begin(), expected.end()), name,
                  " differs in shape from the first operand");
}

// A norm of a block: torch_binding.h defines `kind`.
struct BlockNorm {
  const OptionalTensor &weight, &bias;
  double eps;
  int64_t kind;
};

// The block around an MLP: the last norm is applied to the sum if `norms_sum`, else to the MLP's result.
struct Around {
  const Tensor& residual;
  double factor;
  BlockNorm first, last;
  bool norms_sum;
};

inline void check_norm(const BlockNorm& norm, const char* name, const Tensor& x) {
  const auto kind = static_cast<NormKind>(norm.kind);
  STD_TORCH_CHECK(0 <= norm.kind && kind <= NormKind::kLayerOfOneMore, name, " must be a code of norm.h, not ",
                  norm.kind);
  const auto check_operand = [&](const OptionalTensor& operand, const char* part) {
    if (!operand.has_value()) return;
    if (operand->scalar_type() != torch::headeronly::ScalarType::Float) check_same_kind(*operand, part, x);
    STD_TORCH_CHECK(operand->device() == x.device(), part, " is not on the device of the first operand");
    STD_TORCH_CHECK(kind != NormKind::kNone && rows_that_share(*operand, x), part, " of ", name,
                    " must be [features], as it norms, or one row of these for rows that follow each other");
  };
  check_operand(norm.weight, "the weight");
  check_operand(norm.bias, "the bias");
}

// The block around an MLP with this last weight.
inline void check_around(const Tensor& x, const Tensor& last_weight, const Around& around) {
  check_same_kind(around.residual, "residual", x);
  const auto sizes = around.residual.sizes(), of_x = x.sizes();
  STD_TORCH_CHECK(around.residual.dim() == x.dim() && std::equal(sizes.begin(), sizes.end() - 1, of_x.begin()) &&
                      around.residual.size(-1) == last_weight.size(0),
                  "residual must have the shape of the result");
  check_norm(around.first, "first_norm", x);
  check_norm(around.last, "last_norm", around.residual);
  constexpr auto kScale = static_cast<int64_t>(NormKind::kScale);
  STD_TORCH_CHECK(around.first.kind != kScale && !(around.norms_sum && around.last.kind == kScale),
                  "a scale must be of the MLP's result");
}

// An MLP with the block around it; without a first weight, one layer.
inline void check_residual_mlp(const Tensor& x, const OptionalTensor& fc1_weight, const Tensor& fc2_weight,
                               const OptionalTensor& fc1_bias, const OptionalTensor& fc2_bias, int64_t activation,
                               const Around& around) {
  check_activation(activation);
  if (fc1_weight) {
    check_linear(x, *fc1_weight, fc1_bias);
    check_second(x, *fc1_weight, fc2_weight, fc2_bias);
  } else {
    check_linear(x, fc2_weight, fc2_bias);
  }
  check_around(x, fc2_weight, around);
}

inline void check_residual_gated_mlp(const Tensor& x, const Tensor& gate_weight, const Tensor& up_weight,
                                     const Tensor& down_weight, const OptionalTensor& gate_bias,
                                     const OptionalTensor& up_bias, const OptionalTensor& down_bias, int64_t activation,
                                     const Around& around) {
  check_activation(activation);
  check_gated_linear(x, gate_weight, up_weight, gate_bias, up_bias);
  check_second(x, gate_weight, down_weight, down_bias);
  check_around(x, down_weight, around);
}

// The experts of a mixture: torch_binding.h defines their shapes.
inline void check_experts(const Tensor& x, const Tensor& top_k_index, const Tensor& top_k_weights,
                          const Tensor& gate_up_weight, const Tensor& down_weight, const OptionalTensor& gate_up_bias,
                          const OptionalTensor& down_bias, int64_t activation, bool gated, bool interleaved,
                          bool transposed, std::optional<double> limit, double up_offset) {
  using torch::headeronly::ScalarType;
  check_activation(activation);
  STD_TORCH_CHECK(gate_up_weight.dim() == 3 && down_weight.dim() == 3, "weights must be [experts, out, in]");
  STD_TORCH_CHECK(gated || !(interleaved || limit || up_offset != 0),
                  "interleaved, limit and up_offset must be left out where gated is false");
  STD_TORCH_CHECK(!limit || *limit > 0, "limit must be positive");
  STD_TORCH_CHECK(x.dim() == 2, "x must be [tokens, in]");
  check_same_kind(gate_up_weight, "gate_up_weight", x);
  check_same_kind(down_weight, "down_weight", x);
  const int out = transposed ? 2 : 1, in = transposed ? 1 : 2;
  STD_TORCH_CHECK(gate_up_weight.size(in) == x.size(1), "gate_up_weight must be [experts, out, in], in as in x");
  STD_TORCH_CHECK(gate_up_weight.size(out) == down_weight.size(in) * (gated ? 2 : 1) && gate_up_weight.size(0) > 0 &&
                      gate_up_weight.size(0) == down_weight.size(0),
                  "down_weight must be [experts, out, in] as gate_up_weight has it");
  const auto check_biases = [&](const OptionalTensor& bias, const char* name, const Tensor& weight) {
    if (!bias.has_value()) return;
    check_same_kind(*bias, name, x);
    STD_TORCH_CHECK(bias->dim() == 2 && bias->size(0) == weight.size(0) && bias->size(1) == weight.size(out), name,
                    " must be [experts, out] as in its weight");
  };
  check_biases(gate_up_bias, "gate_up_bias", gate_up_weight);
  check_biases(down_bias, "down_bias", down_weight);
  const auto check_routes = [&](const Tensor& tensor, const char* name) {
    STD_TORCH_CHECK(tensor.dim() == 2 && tensor.size(0) == x.size(0) && tensor.size(1) == top_k_index.size(1) &&
                        tensor.device() == x.device(),
                    name, " must be [tokens, k], tokens as in x, on its device");
  };
  check_routes(top_k_index, "top_k_index");
  check_routes(top_k_weights, "top_k_weights");
  const ScalarType index = top_k_index.scalar_type(), weight = top_k_weights.scalar_type();
  STD_TORCH_CHECK(
      index == ScalarType::Long || index == ScalarType::Int || index == ScalarType::Short || index == ScalarType::Char,
      "top_k_index must be of a signed integer dtype");
  STD_TORCH_CHECK(weight == ScalarType::Float || weight == ScalarType::BFloat16 || weight == ScalarType::Half ||
                      weight == ScalarType::Double,
                  "top_k_weights must be of a floating dtype");
}

// The router of a mixture: torch_binding.h defines its shapes.
inline void check_product(const Tensor& a, const Tensor& b) {
  STD_TORCH_CHECK(a.dim() == 2, "a must be [m, k]");
  check_same_kind(b, "b", a);
  STD_TORCH_CHECK(b.dim() == 2 && b.size(0) == a.size(1), "b must be [k, n]");
}

inline void check_router(const Tensor& x, const Tensor& weight, int64_t top_k) {
  STD_TORCH_CHECK(x.dim() == 2, "x must be [tokens, in]");
  check_weight(weight, "weight", x.size(1), x);
  STD_TORCH_CHECK(0 < top_k && top_k <= weight.size(0), "top_k must be between 1 and the number of experts");
}

inline std::vector<int64_t> dense_strides(torch::headeronly::IntHeaderOnlyArrayRef sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0; stride *= std::max<int64_t>(sizes[d], 1)) strides[d] = stride;
  return strides;
}

// An uninitialised tensor on the device of `like`, with its dtype or another, without the cost of a dispatched op.
inline Tensor new_strided(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes,
                          const std::vector<int64_t>& strides,
                          std::optional<torch::headeronly::ScalarType> of = std::nullopt) {
  int32_t dtype = of ? static_cast<int32_t>(*of) : 0, device_type = 0;
  if (!of) TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &dtype));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(sizes.size(), sizes.data(), strides.data(), dtype, device_type,
                                                  like.get_device_index(), &handle));
  return Tensor(handle);
}

inline Tensor new_dense(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes,
                        std::optional<torch::headeronly::ScalarType> dtype = std::nullopt) {
  return new_strided(like, sizes, dense_strides(sizes), dtype);
}

}  // namespace fused_mlp
