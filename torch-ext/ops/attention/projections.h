#pragma once

#include <array>
#include <vector>

#include "../../operands/operands.h"
#include "../../operands/tensor_rows.h"
#include "../../torch_binding.h"
#include "../torch_gemm.h"

// Linear layers of one input, such as the projections of an attention.
namespace fused_mlp {

constexpr size_t kProjections = 3;
using OfProjections = std::array<const OptionalTensor*, kProjections>;

inline std::vector<int64_t> with_features(const Tensor& x, int64_t features) {
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = features;
  return sizes;
}

// True for matrices of the same size and strides.
inline bool lie_alike(const Tensor& one, const Tensor& other) {
  return one.size(1) == other.size(1) && one.stride(0) == other.stride(0) && one.stride(1) == other.stride(1);
}

// Backend::linear(x, weight, bias): the result for x [..., in]
template <typename Backend>
std::vector<Tensor> projections(const Tensor& x, const OfProjections& weights, const OfProjections& biases) {
  const TensorRows rows(x);
  std::vector<Tensor> found;
  for (size_t i = 0; i < kProjections; ++i) {
    if (!*weights[i]) continue;
    const Tensor& weight = **weights[i];
    check_linear(x, weight, *biases[i]);
    found.push_back(Backend::linear(rows.tensor, weight, *biases[i]));
  }
  return found;
}

// The gradients required by the bits of `needs`, for x, three weights and three biases. The products themselves
// accumulate the gradient of x. A layer whose result has no gradient gets none.
//
// Backend::mm, Backend::add_mm, Backend::batches, Backend::mm_both, Backend::input_gradient: as in backward.h
// Backend::all_column_sums(one to three matrices with the same number of rows): the column sums of each
template <typename Backend>
std::vector<Tensor> projection_gradients(const OfProjections& grads, const OptionalTensor& x,
                                         const OfProjections& weights, int64_t needs) {
  const auto asked = [&](size_t operand) { return (needs >> operand & 1) != 0; };
  const Tensor* like = nullptr;
  std::array<OptionalTensor, kProjections> rows;
  int64_t count = 0;
  for (size_t i = 0; i < kProjections; ++i) {
    if (!*grads[i]) continue;
    const Tensor& grad = **grads[i];
    STD_TORCH_CHECK(grad.dim() > 0, "a gradient must be [..., out]");
    rows[i] = Backend::rows(grad);
    if (like == nullptr) like = &grad, count = rows[i]->size(0);
    check_same_kind(grad, "a gradient", *like);
    STD_TORCH_CHECK(rows[i]->size(0) == count, "gradients must have the same number of rows");
  }
  STD_TORCH_CHECK(like != nullptr, "at least one gradient is required");
  std::vector<Tensor> found;
  if (asked(0)) {
    Products products;
    for (size_t i = kProjections; i-- > 0;) {  // in autograd's order, with the same roundings
      if (!rows[i]) continue;
      STD_TORCH_CHECK(*weights[i], "weights are required for the gradient of x");
      const Tensor& weight = **weights[i];
      check_weight(weight, "weight", products.empty() ? weight.size(-1) : products[0].second.size(1), *like);
      STD_TORCH_CHECK(weight.size(0) == rows[i]->size(1), "weight must be [out, in] with out as in its gradient");
      products.emplace_back(*rows[i], weight);
    }
    const int64_t in = products[0].second.size(1);
    found.push_back(new_dense(*like, with_features(*like, in)));
    const Tensor dx = matrix_view(found.back(), {count, in}, {in, 1});
    auto sum = Backend::input_gradient(products);
    if (sum) sum.launch(dx);
    for (size_t i = 0; !sum && i < products.size(); ++i) {
      const auto& [grad, weight] = products[i];
      i == 0 ? Backend::mm(dx, grad, weight) : Backend::add_mm(dx, grad, weight);
    }
  }
  OptionalTensor x_rows;
  for (size_t i = 0; i < kProjections; ++i) {
    if (!asked(1 + i)) continue;
    STD_TORCH_CHECK(x && rows[i], "x and the output's gradient are required for the gradient of a weight");
    if (!x_rows) x_rows = Backend::rows(*x);
    check_same_kind(*x, "x", *like);
    STD_TORCH_CHECK(x_rows->size(0) == count, "x must have the same number of rows as the gradients");
    const std::vector<int64_t> sizes{rows[i]->size(1), x_rows->size(1)};
    found.push_back(new_dense(*like, sizes));
    const bool both = i + 1 < kProjections && asked(2 + i) && rows[i + 1] && lie_alike(*rows[i], *rows[i + 1]);
    if (both && Backend::batches(*like, sizes[0], sizes[1])) {
      Tensor next = new_dense(*like, sizes);
      Backend::mm_both(found.back(), next, *rows[i], *rows[i + 1], *x_rows);
      found.push_back(next);
      ++i;
    } else {
      Backend::mm(found.back(), transposed(*rows[i]), *x_rows);
    }
  }
  std::vector<Tensor> summed;
  for (size_t i = 0; i < kProjections; ++i) {
    if (!asked(1 + kProjections + i)) continue;
    STD_TORCH_CHECK(rows[i], "the output's gradient is required for the gradient of a bias");
    summed.push_back(*rows[i]);
  }
  if (summed.empty()) return found;
  for (const Tensor& sums : Backend::all_column_sums(summed)) found.push_back(sums);
  return found;
}

}  // namespace fused_mlp
