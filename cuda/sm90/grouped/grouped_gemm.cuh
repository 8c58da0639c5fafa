// The streamed GEMM for rows grouped by weights: the experts of a mixture, for few tokens. A tile has rows of one
// expert. With very few tokens, every CTA searches the index for its rows, which saves the launch of a sort. The rows
// stay in the order of the slots: the TMA loads those of a tile one by one, and the swizzle, which depends on addresses
// only, puts each in place. With more tokens, rows lie in blocks of a tile's height (sorted_rows.cuh).
#pragma once

#include "../../experts/rows/routes.cuh"
#include "../../gemm/grouped.h"
#include "../../overlap.cuh"
#include "../dense/streamed_gemm.cuh"

namespace fused_mlp::sm90 {

struct GroupedGemmArgs {
  StreamedGemmArgs gemm;
  Routes routes;
  GateLimits limits;
  RowBlocks blocks;
  int box_rows;  // rows of a that the TMA loads at a time
  int slots_of_row;
  int weight_rows;
  int rank_weight_rows;
  bool of_slots, rank_of_slots;  // one weight, or low-rank weight, per slot, if rows are not sorted
  int64_t bias_stride;
  int64_t bias_step;
  int tiles_n;
  bool follows_sort;  // starts before the kernel that writes the blocks is done
  bool interleaved;   // with transposed weights: whether columns of gate and up alternate
};

// More CTAs than for a dense product: there are many tiles of rows, and some of them do not exist.
constexpr int grouped_ctas(int rows) { return rows < 32 ? 4 : 2; }

template <typename Element, Product kProduct, int kTokens>
struct GroupedGemm : StreamedShape<Element, kProduct, kTokens, grouped_ctas(kTokens)> {
  static constexpr bool kTakesLowRank = true;
};

// For weights [k, n], with gates and ups concatenated, in their own layout.
template <typename Element, Product kProduct, int kTokens>
struct GroupedTransposed : GroupedGemm<Element, kProduct, kTokens> {
  static constexpr bool kTransposed = true;
  static constexpr bool kTakesLowRank = false;
};

// The rows of a tile, found by all threads of the CTA in shared memory. The compiler rounds a shared variable up to 16
// bytes; the size is explicit, because the launch subtracts it from the space for the ring.
template <int kRows>
struct alignas(16) GroupRows {
  int expert;  // -1 if the tile does not exist
  int count;
  int targets[kRows];  // rows of the output
  int sources[kRows];  // the first row of each box of a

  __device__ __forceinline__ void find(const GroupedGemmArgs& args, int tile) {
    if (args.blocks.codes == nullptr) {
      search(args.routes, args.slots_of_row, tile);
    } else {
      take(args.blocks, tile);
    }
    __syncthreads();
  }

 private:
  // Called by one warp with one lane per slot. An expert's slots are divided into tiles in order; a tile's number is
  // that of its first slot.
  __device__ __forceinline__ void search(const Routes& routes, int slots_of_row, int tile) {
    static_assert(kSearchedSlots == 32, "a lane for each slot");
    if (threadIdx.x >= 32) return;
    const int slot = threadIdx.x;
    const unsigned before = (1u << slot) - 1;
    const int mine = slot < routes.slots() ? expert_of(routes, slot) : -1;
    const unsigned alike = __match_any_sync(0xFFFFFFFF, mine);
    const int row = __popc(alike & before);  // among those of its expert
    const bool begins_tile = mine >= 0 && row % kRows == 0;
    const unsigned begins = __ballot_sync(0xFFFFFFFF, begins_tile);
    const unsigned wanted = __ballot_sync(0xFFFFFFFF, begins_tile && __popc(begins & before) == tile);
    if (wanted == 0) {
      if (slot == 0) expert = -1, count = 0;
      return;
    }
    const int leader = __ffs(wanted) - 1;
    const int at = row - __shfl_sync(0xFFFFFFFF, row, leader);
    const bool taken = mine == __shfl_sync(0xFFFFFFFF, mine, leader) && 0 <= at && at < kRows;
    if (taken) {
      targets[at] = slot;
      sources[at] = slot / slots_of_row;
    }
    const int all = __popc(__ballot_sync(0xFFFFFFFF, taken));
    if (slot == leader) expert = mine, count = all;
  }

  // A tile is a block.
  __device__ __forceinline__ void take(const RowBlocks& blocks, int tile) {
    const int i = threadIdx.x;
    if (i < kRows) {
      targets[i] = tile * kRows + i;
      sources[i] = tile * kRows + i * kSortedBoxRows;
    }
    if (i == 0) {
      const BlockCode code{load_fresh(blocks.codes + tile)};
      expert = tile < load_fresh(blocks.count) ? code.expert() : -1;
      count = code.rows();
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

  // A tile's first slot identifies the weights of its expert too.
  __device__ __forceinline__ int group(bool of_slots) const { return of_slots ? rows.targets[0] : rows.expert; }
  __device__ __forceinline__ int weight_row() const { return group(args.of_slots) * args.weight_rows + column; }
  __device__ __forceinline__ int rank_weight_row() const {
    return group(args.rank_of_slots) * args.rank_weight_rows + column;
  }
  // The 64 rows of k of a block, and 64 columns for each part.
  __device__ __forceinline__ void load_weights(uint32_t full, uint32_t weights, int block) const {
    const int row = rows.expert * args.weight_rows + block * Gemm::kBlockK;
    const int first = alternates() ? column * Gemm::kParts : column;
    const int between = alternates() ? Gemm::kRows : args.gemm.n;
#pragma unroll
    for (int part = 0; part < Gemm::kParts; ++part) {
      tma_load(&args.gemm.weight, full, weights + part * Gemm::kWeightBytes, first + part * between, row);
    }
  }
  __device__ __forceinline__ bool alternates() const { return args.interleaved; }
  __device__ __forceinline__ int tokens() const { return rows.count; }
  __device__ __forceinline__ int boxes() const { return (rows.count + args.box_rows - 1) / args.box_rows; }
  __device__ __forceinline__ int loaded_tokens() const { return boxes() * args.box_rows; }
  __device__ __forceinline__ void load_tokens(uint32_t full, uint32_t tokens, int k) const {
    const uint32_t box_bytes = args.box_rows * Gemm::kBlockK * sizeof(Element);
    for (int i = 0; i < boxes(); ++i) tma_load(&args.gemm.a, full, tokens + i * box_bytes, k, rows.sources[i]);
  }
  __device__ __forceinline__ void load_rank_rows(uint32_t full, uint32_t tokens, int k) const {
    const uint32_t box_bytes = args.box_rows * Gemm::kBlockK * sizeof(Element);
    const int* const first_rows = args.blocks.codes == nullptr ? rows.targets : rows.sources;
    for (int i = 0; i < boxes(); ++i)
      tma_load(&args.gemm.low_rank.rows, full, tokens + i * box_bytes, k, first_rows[i]);
  }
  __device__ __forceinline__ int64_t out_row(int token) const { return rows.targets[token]; }

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
  const StreamedGemmShared<Gemm> shared(raw_shared, Gemm::kRows, args.gemm.stages);
  const int rank = cluster_rank();
  const int ranks = cluster_size();
  const int index = blockIdx.x / ranks;

  prepare_to_stream(args.gemm, shared);
  if (args.follows_sort) wait_for_previous_kernel();
  allow_next_kernel();  // it may read the blocks, which are written
  rows.find(args, index / args.tiles_n);
  if (rows.expert < 0) {  // for all CTAs of the cluster
    // The next kernel only waits for this one, so this one must not end before the kernel that it follows.
    wait_for_previous_kernel();
    return;
  }
  compute(args.gemm, shared, GroupTile<Gemm>{args, rows, index % args.tiles_n * Gemm::kRows}, rank, ranks);
#endif
}

}  // namespace fused_mlp::sm90
