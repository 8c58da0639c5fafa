// The last of the launches that compute the experts of a mixture: adds up, for every token, the rows of its slots.
#pragma once

#include "../gemm/epilogue.cuh"
#include "ptx.cuh"
#include "routes.cuh"

namespace fused_mlp::sm90 {

constexpr int kSumThreads = 128;
constexpr int kSumColumns = 8;  // of a thread, 16 bytes

__device__ __forceinline__ float weight_of(const WeightedSum& sum, int slot) {
  switch (sum.type) {
    case WeightType::kFloat32:
      return __ldg(static_cast<const float*>(sum.weights) + slot);
    case WeightType::kFloat64:
      return static_cast<float>(__ldg(static_cast<const double*>(sum.weights) + slot));
    case WeightType::kFloat16:
      return static_cast<float>(__ldg(static_cast<const __half*>(sum.weights) + slot));
    default:
      return static_cast<float>(__ldg(static_cast<const __nv_bfloat16*>(sum.weights) + slot));
  }
}

template <typename Element>
__global__ void __launch_bounds__(kSumThreads) weighted_sum_kernel(const __grid_constant__ WeightedSum sum) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  const int chunks = sum.n / kSumColumns;
  const int64_t index = int64_t{blockIdx.x} * kSumThreads + threadIdx.x;
  const int token = static_cast<int>(index / chunks);
  const int64_t column = index % chunks * kSumColumns;
  wait_for_previous_kernel();
  if (token >= sum.routes.tokens) return;
  float total[kSumColumns] = {};
#pragma unroll 4
  for (int i = 0; i < sum.routes.top_k; ++i) {
    const int slot = token * sum.routes.top_k + i;
    if (expert_of(sum.routes, slot) < 0) continue;
    const int64_t at = sum.row_of_slot == nullptr ? slot : sum.row_of_slot[slot];
    const float weight = weight_of(sum, slot);
    // Not through the cache of what is only read: the rows are written while this kernel starts.
    const uint4 row = *reinterpret_cast<const uint4*>(static_cast<const Element*>(sum.rows) + at * sum.n + column);
    using Pair = typename ElementTraits<Element>::Pair;
    const auto add = [&](int first, uint32_t bits) {
      const float2 values = to_float2(*reinterpret_cast<const Pair*>(&bits));
      total[first] = fmaf(weight, values.x, total[first]);
      total[first + 1] = fmaf(weight, values.y, total[first + 1]);
    };
    add(0, row.x), add(2, row.y), add(4, row.z), add(6, row.w);
  }
  *reinterpret_cast<uint4*>(static_cast<Element*>(sum.out) + token * int64_t{sum.n} + column) =
      make_uint4(round_pair<Element>(total[0], total[1]), round_pair<Element>(total[2], total[3]),
                 round_pair<Element>(total[4], total[5]), round_pair<Element>(total[6], total[7]));
#endif
}

}  // namespace fused_mlp::sm90
