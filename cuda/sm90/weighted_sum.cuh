// The last of the launches that compute the experts of a mixture: adds up, for every token, the rows of its slots.
#pragma once

#include "../gemm/epilogue.cuh"
#include "ptx.cuh"
#include "routes.cuh"

namespace fused_mlp::sm90 {

constexpr int kSumThreads = 128;
constexpr int kSumColumns = 8;  // of a thread, 16 bytes
constexpr int kSumTerms = 8;    // that a thread reads at once

// A term of a token's sum: a row, and its weight.
struct SumTerm {
  int row;  // -1 where it is skipped
  float weight;

  __device__ __forceinline__ SumTerm() = default;
  __device__ __forceinline__ SumTerm(const WeightedSum& sum, int token, int choice) : row(-1), weight(0.0f) {
    const int slot = token * sum.routes.top_k + choice;
    if (choice >= sum.routes.top_k || expert_of(sum.routes, slot) < 0) return;
    row = sum.row_of_slot == nullptr ? slot : load_fresh(sum.row_of_slot + slot);
    weight = sum.weights == nullptr ? 1.0f : weight_of(sum.weights, sum.type, slot);
  }
};

// How many warps share a token's columns.
__host__ __device__ constexpr int sum_warps(int n) { return (n / kSumColumns + 31) / 32; }

// Each warp has a token: its lanes look up a term each, which takes two loads that wait for each other, and then all
// add the same terms.
template <typename Element>
__global__ void __launch_bounds__(kSumThreads) weighted_sum_kernel(const __grid_constant__ WeightedSum sum) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  const int warp = static_cast<int>(blockIdx.x) * (kSumThreads / 32) + warp_uniform(threadIdx.x / 32);
  const int lane = threadIdx.x % 32;
  const int token = warp / sum_warps(sum.n);
  const int column = (warp % sum_warps(sum.n) * 32 + lane) * kSumColumns;
  const bool exists = token < sum.routes.tokens;
  // What says where the rows are was there before the kernel started that writes them.
  SumTerm mine;
  if (exists) mine = SumTerm(sum, token, lane);
  wait_for_previous_kernel();
  if (!exists) return;
  float total[kSumColumns] = {};
  for (int first = 0; first < sum.routes.top_k; first += kSumTerms) {
    if (first > 0 && first % 32 == 0) mine = SumTerm(sum, token, first + lane);
    SumTerm terms[kSumTerms];
    uint4 rows[kSumTerms];
#pragma unroll
    for (int i = 0; i < kSumTerms; ++i) {
      terms[i].row = __shfl_sync(0xFFFFFFFF, mine.row, first % 32 + i);
      terms[i].weight = __shfl_sync(0xFFFFFFFF, mine.weight, first % 32 + i);
      // Not through the cache of what is only read: the rows are written while this kernel starts.
      const auto* row = static_cast<const Element*>(sum.rows) + int64_t{terms[i].row} * sum.n + column;
      rows[i] = terms[i].row < 0 || column >= sum.n ? make_uint4(0, 0, 0, 0) : *reinterpret_cast<const uint4*>(row);
    }
#pragma unroll
    for (int i = 0; i < kSumTerms; ++i) {
      if (terms[i].row < 0) continue;
      using Pair = typename ElementTraits<Element>::Pair;
      const auto add = [&](int first, uint32_t bits) {
        const float2 values = to_float2(*reinterpret_cast<const Pair*>(&bits));
        total[first] = fmaf(terms[i].weight, values.x, total[first]);
        total[first + 1] = fmaf(terms[i].weight, values.y, total[first + 1]);
      };
      add(0, rows[i].x), add(2, rows[i].y), add(4, rows[i].z), add(6, rows[i].w);
    }
  }
  if (column >= sum.n) return;
  *reinterpret_cast<uint4*>(static_cast<Element*>(sum.out) + token * int64_t{sum.n} + column) =
      make_uint4(round_pair<Element>(total[0], total[1]), round_pair<Element>(total[2], total[3]),
                 round_pair<Element>(total[4], total[5]), round_pair<Element>(total[6], total[7]));
#endif
}

}  // namespace fused_mlp::sm90
