// The last of the launches that compute the experts of a mixture: adds up the rows of every token's slots.
#pragma once

#include "../../gemm/epilogue.cuh"
#include "../../loads.cuh"
#include "../../overlap.cuh"
#include "routes.cuh"

namespace fused_mlp {

constexpr int kSumThreads = 128;
constexpr int kSumColumns = 8;  // columns that a thread adds up: 16 bytes
constexpr int kSumTerms = 8;    // terms that a thread reads at once
constexpr int kSumCtas = 8;     // CTAs per multiprocessor, to keep enough loads in flight

// A term of a token's sum: a row, and its weight.
struct SumTerm {
  int row = -1;  // -1 if it is skipped
  float weight = 0.0f;
};

__device__ __forceinline__ SumTerm sum_term(const WeightedSum& sum, int token, int choice) {
  if (choice >= sum.routes.top_k) return {};
  const int slot = token * sum.routes.top_k + choice;
  // The two loads do not wait for each other.
  const float weight = sum.weights == nullptr ? 1.0f : weight_of(sum.weights, sum.type, slot);
  const int row = sum.row_of_slot != nullptr        ? load_fresh(sum.row_of_slot + slot)
                  : expert_of(sum.routes, slot) < 0 ? -1
                                                    : slot;
  return {row, row < 0 ? 0.0f : weight};
}

// The number of warps that share a token's columns.
__host__ __device__ constexpr int sum_warps(int n) { return (n / kSumColumns + 31) / 32; }

// Each warp has a token: each lane looks up one term, and then all lanes add the same terms. Skipped terms add zeros.
template <typename Element>
__global__ void __launch_bounds__(kSumThreads, kSumCtas) weighted_sum_kernel(const __grid_constant__ WeightedSum sum) {
  const int warp = static_cast<int>(blockIdx.x) * (kSumThreads / 32) + static_cast<int>(threadIdx.x / 32);
  const int lane = threadIdx.x % 32;
  const int token = warp / sum_warps(sum.n);
  const int column = (warp % sum_warps(sum.n) * 32 + lane) * kSumColumns;
  const bool exists = token < sum.routes.tokens;
  // The index of the rows existed before the start of the kernel that writes the rows.
  SumTerm mine;
  if (exists) mine = sum_term(sum, token, lane);
  wait_for_previous_kernel();
  if (!exists) return;
  float total[kSumColumns] = {};
  const uint64_t policy = first_to_leave_l2();
  for (int first = 0; first < sum.routes.top_k; first += kSumTerms) {
    if (first > 0 && first % 32 == 0) mine = sum_term(sum, token, first + lane);
    uint4 rows[kSumTerms];
#pragma unroll
    for (int i = 0; i < kSumTerms; ++i) {
      const int row = __shfl_sync(0xFFFFFFFF, mine.row, first % 32 + i);
      // Does not use the read-only cache: the rows may still be written while this kernel starts.
      const auto* from = static_cast<const Element*>(sum.rows) + int64_t{row} * sum.n + column;
      rows[i] = row < 0 || column >= sum.n ? make_uint4(0, 0, 0, 0) : load_once(from, policy);
    }
#pragma unroll
    for (int i = 0; i < kSumTerms; ++i) {
      const float weight = __shfl_sync(0xFFFFFFFF, mine.weight, first % 32 + i);
      using Pair = typename ElementTraits<Element>::Pair;
      const auto add = [&](int first, uint32_t bits) {
        const float2 values = to_float2(*reinterpret_cast<const Pair*>(&bits));
        total[first] = fmaf(weight, values.x, total[first]);
        total[first + 1] = fmaf(weight, values.y, total[first + 1]);
      };
      add(0, rows[i].x), add(2, rows[i].y), add(4, rows[i].z), add(6, rows[i].w);
    }
  }
  if (column >= sum.n) return;
  if (sum.residual.data != nullptr) {
    const auto* from = static_cast<const Element*>(sum.residual.data) + token * sum.residual.row_stride + column;
    using Pair = typename ElementTraits<Element>::Pair;
#pragma unroll
    for (int i = 0; i < kSumColumns; i += 2) {
      const Pair values{from[i], from[i + 1]};
      total[i] += to_float2(values).x, total[i + 1] += to_float2(values).y;
    }
  }
  *reinterpret_cast<uint4*>(static_cast<Element*>(sum.out) + token * int64_t{sum.n} + column) =
      make_uint4(round_pair<Element>(total[0], total[1]), round_pair<Element>(total[2], total[3]),
                 round_pair<Element>(total[4], total[5]), round_pair<Element>(total[6], total[7]));
}

}  // namespace fused_mlp
