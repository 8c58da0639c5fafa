// The router of a mixture: torch's GEMM, and the choice of each token.
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "../torch-ext/operands.h"
#include "../torch-ext/torch_binding.h"
#include "../torch-ext/torch_gemm.h"

namespace fused_mlp {

using torch::headeronly::ScalarType;

std::tuple<Tensor, Tensor, Tensor> top_k_router(const Tensor& x, const Tensor& weight, int64_t top_k, bool normalized,
                                                bool) {
  check_router(x, weight, top_k);
  // Two logits of 16 bits are often equal, and which of them torch's CPU code chooses is not said.
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float, "x must be float32 on the CPU");
  const int64_t tokens = x.size(0), experts = weight.size(0);
  const Tensor logits = new_dense(x, {tokens, experts}), weights = new_dense(x, {tokens, top_k});
  const Tensor index = new_dense(x, {tokens, top_k}, ScalarType::Long);
  linear_into<aoti_torch_cpu_mm_out, aoti_torch_cpu_addmm_out>(logits, x, weight, std::nullopt);
  const auto* const of_tokens = static_cast<const float*>(logits.const_data_ptr());
  auto* const chosen = static_cast<int64_t*>(index.mutable_data_ptr());
  auto* const of_chosen = static_cast<float*>(weights.mutable_data_ptr());
  torch::stable::parallel_for(0, tokens, std::max<int64_t>(1, 4096 / experts), [&](int64_t begin, int64_t end) {
    std::vector<float> values(experts);
    std::vector<int64_t> order(experts);
    for (int64_t t = begin; t < end; ++t) {
      const float* const row = of_tokens + t * experts;
      const float largest = *std::max_element(row, row + experts);
      for (int64_t e = 0; e < experts; ++e) values[e] = std::exp(row[e] - largest);
      const float sum = std::accumulate(values.begin(), values.end(), 0.0f);
      for (float& value : values) value /= sum;
      std::iota(order.begin(), order.end(), 0);
      std::partial_sort(order.begin(), order.begin() + top_k, order.end(), [&](int64_t a, int64_t b) {
        const bool a_is_nan = std::isnan(values[a]), b_is_nan = std::isnan(values[b]);  // which torch puts first
        if (a_is_nan || b_is_nan) return a_is_nan && (!b_is_nan || a < b);
        return values[a] != values[b] ? values[a] > values[b] : a < b;
      });
      float total = 1.0f;
      if (normalized) {
        total = 0.0f;
        for (int64_t k = 0; k < top_k; ++k) total += values[order[k]];
      }
      for (int64_t k = 0; k < top_k; ++k) {
        chosen[t * top_k + k] = order[k];
        of_chosen[t * top_k + k] = values[order[k]] / total;
      }
    }
  });
  return {logits, weights, index};
}

}  // namespace fused_mlp
