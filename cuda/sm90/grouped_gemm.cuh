// The streamed GEMM for rows grouped by weights: the experts of a mixture, for few tokens. Every CTA finds its rows in
// the index by itself, which takes the place of a launch that would sort it. Rows stay where they are, in the order of
// the slots: the TMA brings those of a tile one by one, and the swizzle, which is one of addresses, puts each in place.
#pragma once

#include "../gemm/grouped.h"
#include "routes.cuh"
#include "streamed_gemm.cuh"

namespace fused_mlp::sm90 {

struct GroupedGemmArgs {
  StreamedGemmArgs gemm;
  Routes routes;
  GateLimits limits;
  int slots_of_row;
  int weight_rows;
  int64_t bias_stride;
  int64_t bias_step;
  int tiles_n;
};

// The rows of a tile, found by all threads of the CTA in shared memory. The compiler gives a shared variable multiples
// of 16 bytes; the size says so, because the launch takes it off what is left for the ring.
template <int kRows>
struct alignas(16) GroupRows {
  int expert;  // -1 where the tile does not exist
  int count;
  int first;                                // of the expert's rows
  int slots[kRows];                         // rows of the output
  int sources[kRows];                       // rows of a
  unsigned counts[kMaxGroupedExperts / 2];  // slots of each expert, two 16-bit counts in a word

  static_assert(kMaxStreamedSlots < 1 << 16, "a count has 16 bits");

  __device__ __forceinline__ int slots_of(int expert) const { return counts[expert / 2] >> expert % 2 * 16 & 0xFFFF; }

  // Tiles are numbered by their experts, and within an expert by the order of its slots.
  __device__ __forceinline__ void find(const Routes& routes, int slots_of_row, int tile) {
    for (int i = threadIdx.x; i < (routes.experts + 1) / 2; i += blockDim.x) counts[i] = 0;
    if (threadIdx.x == 0) expert = -1;
    __syncthreads();
    for (int slot = threadIdx.x; slot < routes.slots(); slot += blockDim.x) {
      const int found = expert_of(routes, slot);
      if (found >= 0) atomicAdd(&counts[found / 2], 1u << found % 2 * 16);
    }
    __syncthreads();
    if (threadIdx.x < 32) {
      find_expert(routes.experts, tile);
      __syncwarp();
      if (expert >= 0) collect(routes, slots_of_row);
    }
    __syncthreads();
  }

 private:
  // By one warp, a lane an expert.
  __device__ __forceinline__ void find_expert(int experts, int tile) {
    const int lane = threadIdx.x;
    int before = 0;  // tiles
    for (int begin = 0; begin < experts && before <= tile; begin += 32) {
      const int rows = begin + lane < experts ? slots_of(begin + lane) : 0;
      const int tiles = (rows + kRows - 1) / kRows;
      const int last = sum_of_lanes(tiles);  // and those of the lanes before
      const int number = tile - before - (last - tiles);
      if (0 <= number && number < tiles) {
        expert = begin + lane;
        first = number * kRows;
        count = min(kRows, rows - first);
      }
      before += __shfl_sync(0xFFFFFFFF, last, 31);
    }
  }

  // By one warp, a lane a slot.
  __device__ __forceinline__ void collect(const Routes& routes, int slots_of_row) {
    const int lane = threadIdx.x;
    int row = -first;  // within the tile
    for (int begin = 0; begin < routes.slots() && row < count; begin += 32) {
      const int slot = begin + lane;
      const bool mine = slot < routes.slots() && expert_of(routes, slot) == expert;
      const unsigned votes = __ballot_sync(0xFFFFFFFF, mine);
      const int at = row + __popc(votes & ((1u << lane) - 1));
      if (mine && 0 <= at && at < count) {
        slots[at] = slot;
        sources[at] = slot / slots_of_row;
      }
      row += __popc(votes);
    }
  }
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// The StreamedTile of rows of one expert.
template <typename Gemm>
struct GroupTile {
  using Element = typename Gemm::Element;
  const GroupedGemmArgs& args;
  const GroupRows<Gemm::kTokens>& rows;
  int column;

  __device__ __forceinline__ int weight_row() const { return rows.expert * args.weight_rows + column; }
  __device__ __forceinline__ int tokens() const { return rows.count; }
  __device__ __forceinline__ int loaded_tokens() const { return rows.count; }
  __device__ __forceinline__ void load_tokens(uint32_t full, uint32_t tokens, int k) const {
    for (int i = 0; i < rows.count; ++i) {
      tma_load(&args.gemm.a, full, tokens + i * Gemm::kBlockK * sizeof(Element), k, rows.sources[i]);
    }
  }
  __device__ __forceinline__ int64_t out_row(int token) const { return rows.slots[token]; }

  __device__ __forceinline__ float4 finished(Operand operand, float4 sum, int first) const {
    const void* biases = operand == Operand::kGate ? args.gemm.epilogue.bias : args.gemm.epilogue.up_bias;
    if (biases != nullptr) {
      const Element* bias = static_cast<const Element*>(biases) + rows.expert * args.bias_stride;
      const auto at = [&](int column) { return static_cast<float>(__ldg(bias + column * args.bias_step)); };
      sum = make_float4(sum.x + at(first), sum.y + at(first + 1), sum.z + at(first + 2), sum.w + at(first + 3));
    }
    if constexpr (!Gemm::kGated) return sum;
    const auto bounded = [&](float value) { return limited(args.limits, operand, value); };
    return make_float4(bounded(sum.x), bounded(sum.y), bounded(sum.z), bounded(sum.w));
  }
};

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <typename Gemm>
__global__ void __launch_bounds__(Gemm::kThreads, Gemm::kCtasPerMultiprocessor)
    grouped_gemm_kernel(const __grid_constant__ GroupedGemmArgs args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ uint8_t raw_shared[];
  __shared__ GroupRows<Gemm::kTokens> rows;
  const StreamedGemmShared<Gemm> shared(raw_shared);
  const int rank = cluster_rank();
  const int ranks = cluster_size();
  const int index = blockIdx.x / ranks;

  prepare_to_stream(args.gemm, shared);
  allow_next_kernel();
  rows.find(args.routes, args.slots_of_row, index / args.tiles_n);
  if (rows.expert < 0) {  // for all CTAs of the cluster
    // The kernel behind this one waits for this one alone: it must not end before the kernel that it follows.
    wait_for_previous_kernel();
    return;
  }
  compute(args.gemm, shared, GroupTile<Gemm>{args, rows, index % args.tiles_n * Gemm::kRows}, rank, ranks);
#endif
}

}  // namespace fused_mlp::sm90
