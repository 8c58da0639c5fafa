#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <tuple>
#include <utility>
#include <vector>

#include "../../operands/operands.h"
#include "../../operands/tensor_rows.h"
#include "../../torch_binding.h"
#include "norm.h"

// A single norm, or a norm of a sum, forward and backward, by a backend's kernels.
namespace fused_mlp {

// Bits of `needs`.
enum NormNeeds : int64_t {
  kNeedsX = 1,
  kNeedsNormWeight = 2,
  kNeedsNormBias = 4,
  kNeedsDropped = 8,
  kNeedsDroppedBias = 16
};

inline void check_norm_alone(const BlockNorm& norm, const Tensor& x) {
  STD_TORCH_CHECK(x.dim() > 0, "x must be [..., features]");
  check_norm(norm, "norm", x);
  const auto kind = static_cast<NormKind>(norm.kind);
  STD_TORCH_CHECK(kind != NormKind::kNone && kind != NormKind::kScale, "norm must be the code of a norm, not ",
                  norm.kind);
  for (const OptionalTensor* each : {&norm.weight, &norm.bias}) {
    STD_TORCH_CHECK(!*each || (*each)->dim() == 1, "the weight and the bias of a norm must be [features]");
  }
  STD_TORCH_CHECK(!norm.weight || !norm.bias || norm.weight->scalar_type() == norm.bias->scalar_type(),
                  "the bias of a norm must have the dtype of its weight");
}

inline bool is_centred(int64_t kind) { return Norm{static_cast<NormKind>(kind)}.centred(); }

inline Tensor new_statistics(const Tensor& x, int64_t rows, int64_t kind) {
  return new_dense(x, std::vector<int64_t>{is_centred(kind) ? 2 : 1, rows}, torch::headeronly::ScalarType::Float);
}

// Backend::norm(rows of x, norm, y, statistics)
template <typename Backend>
std::tuple<Tensor, Tensor> normed(const Tensor& x, const BlockNorm& given, bool rounded) {
  const TensorRows rows(x);
  const RowFeatures weight(given.weight, x), bias(given.bias, x);
  const Norm norm{static_cast<NormKind>(given.kind),
                  weight.get(),
                  bias.get(),
                  static_cast<float>(given.eps),
                  Residual::kNone,
                  /*factor=*/1.0f,
                  rounded};
  const Tensor y = new_dense(x, x.sizes()), statistics = new_statistics(x, rows.rows, given.kind);
  Backend::norm(rows, norm, y, statistics);
  return {y, statistics};
}

// Backend::kSums: whether sums after a dropout, and their gradients, are supported.
// Backend::drop(x, p): x after torch's dropout, and the mask
// Backend::sum_norm(rows of x, of the residual, norm, sum, y, statistics): sum may be x
template <typename Backend>
std::vector<Tensor> sum_normed(const Tensor& x, const Tensor& residual, const BlockNorm& given, double dropout) {
  check_norm_alone(given, x);
  check_same_shape(residual, "residual", x);
  STD_TORCH_CHECK(dropout >= 0 && dropout < 1, "dropout must be at least 0 and less than 1, not ", dropout);
  STD_TORCH_CHECK(dropout == 0 || x.is_contiguous(), "x must be contiguous if dropout is applied to it");
  OptionalTensor dropped, kept;
  if (dropout > 0 && x.numel() > 0) std::tie(dropped, kept) = Backend::drop(x, dropout);
  const TensorRows rows(dropped ? *dropped : x), others(residual);
  const RowFeatures weight(given.weight, x), bias(given.bias, x);
  const Norm norm{static_cast<NormKind>(given.kind), weight.get(),      bias.get(),
                  static_cast<float>(given.eps),     Residual::kNormed, 1.0f};
  const Tensor y = new_dense(x, x.sizes()), statistics = new_statistics(x, rows.rows, given.kind);
  const Tensor sum = dropped ? *dropped : new_dense(x, x.sizes());
  Backend::sum_norm(rows, others, norm, sum, y, statistics);
  if (!kept) return {y, sum, statistics};
  return {y, sum, statistics, *kept};
}

// The required gradients, in the order of their bits.
struct NormGradientsOf {
  OptionalTensor x, weight, bias, dropped, dropped_bias;
};

// Backend::gradients(rows of x, of grad, of the residual's gradient or null, norm, statistics, mask, dropout, the
// required gradients)
template <typename Backend>
std::vector<Tensor> norm_gradients(const Tensor& grad, const Tensor& x, const OptionalTensor& weight,
                                   const Tensor& statistics, const OptionalTensor& residual_grad,
                                   const OptionalTensor& kept, double dropout, int64_t kind, int64_t needs) {
  check_norm_alone({weight, std::nullopt, 0.0, kind}, x);
  check_same_shape(grad, "grad", x);
  if (residual_grad) check_same_shape(*residual_grad, "residual_grad", x);
  const TensorRows rows(x), grads(grad);
  STD_TORCH_CHECK(statistics.dim() == 2 && statistics.size(0) == (is_centred(kind) ? 2 : 1) &&
                      statistics.size(1) == rows.rows && statistics.is_contiguous() &&
                      statistics.scalar_type() == torch::headeronly::ScalarType::Float &&
                      statistics.device() == x.device(),
                  "statistics must be those that the forward returned");
  const RowFeatures weights(weight, x);
  const Norm norm{static_cast<NormKind>(kind), weights.get(), kNoFeatures, 0.0f, Residual::kNone, 1.0f};
  std::optional<TensorRows> others;
  if (residual_grad) others.emplace(*residual_grad);
  const auto made = [&](int64_t bit, const auto& sizes, const Tensor& like) {
    return needs & bit ? OptionalTensor(new_dense(like, sizes)) : std::nullopt;
  };
  const std::vector<int64_t> features{x.size(-1)};
  const Tensor& like = weight ? *weight : x;
  const NormGradientsOf wanted{made(kNeedsX, x.sizes(), x), made(kNeedsNormWeight, features, like),
                               made(kNeedsNormBias, features, like), made(kNeedsDropped, x.sizes(), x),
                               made(kNeedsDroppedBias, features, x)};
  if (kept) {
    STD_TORCH_CHECK(kept->is_contiguous() && kept->scalar_type() == torch::headeronly::ScalarType::Bool &&
                        kept->numel() == x.numel() && kept->device() == x.device(),
                    "kept must be the mask that the forward returned");
  }
  STD_TORCH_CHECK(Backend::kSums || !(kept || wanted.dropped || wanted.dropped_bias),
                  "gradients before a dropout are supported on GPUs only");
  STD_TORCH_CHECK(!residual_grad || !(kept || wanted.dropped || wanted.dropped_bias),
                  "residual_grad must be None if gradients before a dropout are requested");
  Backend::gradients(rows, grads, others ? &*others : nullptr, norm, statistics, kept, dropout, wanted);
  std::vector<Tensor> found;
  for (const OptionalTensor* each : {&wanted.x, &wanted.weight, &wanted.bias, &wanted.dropped, &wanted.dropped_bias}) {
    if (*each) found.push_back(**each);
  }
  return found;
}

}  // namespace fused_mlp
