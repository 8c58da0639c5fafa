// The router of a mixture: torch's GEMM, and the choice of experts for each token.
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <numeric>
#include <vector>

#include "../../torch-ext/operands/operands.h"
#include "../../torch-ext/ops/torch_gemm.h"
#include "../../torch-ext/torch_binding.h"

namespace fused_mlp {

using torch::headeronly::ScalarType;
using torch::stable::detail::from;
using torch::stable::detail::to;

namespace {

// Two probabilities with a smaller relative difference may be equal in torch, or in the other order.
constexpr float kNear = 1e-6f;

// torch's choice among the experts: the weights, and the index.
std::array<Tensor, 2> torch_choice(const Tensor& logits, int64_t top_k) {
  std::array<StableIValue, 3> softmax{from(logits), from(int64_t{-1}), from(false)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::_softmax", "", softmax.data(), TORCH_ABI_VERSION));
  std::array<StableIValue, 5> topk{softmax[0], from(top_k), from(int64_t{-1}), from(true), from(true)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::topk", "", topk.data(), TORCH_ABI_VERSION));
  return {to<Tensor>(topk[0]), to<Tensor>(topk[1])};
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> top_k_router(const Tensor& x, const Tensor& weight, int64_t top_k, bool normalized,
                                                bool) {
  check_router(x, weight, top_k);
  // 16-bit logits are often equal, and would be left to torch anyway.
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float, "x must be float32 on the CPU");
  const int64_t tokens = x.size(0), experts = weight.size(0);
  const Tensor logits = new_dense(x, {tokens, experts});
  Tensor weights = new_dense(x, {tokens, top_k});
  Tensor index = new_dense(x, {tokens, top_k}, ScalarType::Long);
  linear_into<aoti_torch_cpu_mm_out, aoti_torch_cpu_addmm_out>(logits, x, weight, std::nullopt);
  const auto* const of_tokens = static_cast<const float*>(logits.const_data_ptr());
  auto* const chosen = static_cast<int64_t*>(index.mutable_data_ptr());
  auto* const of_chosen = static_cast<float*>(weights.mutable_data_ptr());
  const int64_t compared = std::min(top_k + 1, experts);
  std::atomic<bool> decided{true};
  torch::stable::parallel_for(0, tokens, std::max<int64_t>(1, 4096 / experts), [&](int64_t begin, int64_t end) {
    std::vector<float> values(experts);
    std::vector<int64_t> order(experts);
    for (int64_t t = begin; t < end; ++t) {
      const float* const row = of_tokens + t * experts;
      const float largest = *std::max_element(row, row + experts);
      for (int64_t e = 0; e < experts; ++e) values[e] = std::exp(row[e] - largest);
      const float sum = std::accumulate(values.begin(), values.end(), 0.0f);
      if (!(sum < INFINITY)) decided = false;  // some logits are NaN, which have no order
      if (!decided) return;
      for (float& value : values) value /= sum;
      std::iota(order.begin(), order.end(), 0);
      std::partial_sort(order.begin(), order.begin() + compared, order.end(),
                        [&](int64_t a, int64_t b) { return values[a] > values[b]; });
      for (int64_t k = 1; k < compared; ++k) {
        const float more = values[order[k - 1]];
        if (!(more - values[order[k]] > kNear * more)) decided = false;
      }
      for (int64_t k = 0; k < top_k; ++k) {
        chosen[t * top_k + k] = order[k];
        of_chosen[t * top_k + k] = values[order[k]];
      }
    }
  });
  // Among equal values, torch's choice is unspecified and depends on how many there are.
  if (!decided) std::tie(weights, index) = std::tuple_cat(torch_choice(logits, top_k));
  if (normalized) {
    float* const of_tokens_chosen = static_cast<float*>(weights.mutable_data_ptr());
    for (float* row = of_tokens_chosen; row != of_tokens_chosen + tokens * top_k; row += top_k) {
      const float total = std::accumulate(row, row + top_k, 0.0f);
      for (int64_t k = 0; k < top_k; ++k) row[k] /= total;
    }
  }
  return {logits, weights, index};
}

}  // namespace fused_mlp
