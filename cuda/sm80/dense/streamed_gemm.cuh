// The GEMM for few rows of a. Its time is that of reading the weights, which pass through shared memory once for each
// tile of rows. Weight rows are the M side of the products, and the rows of a (tokens) are the N side, 8 at least: so
// no part of the weights' 16 rows is wasted.
//
// CTAs are persistent, and their copies run ahead of their products by the whole ring, also from one tile to the next:
// they go on while the sums of a tile are added and stored. Up to 32 tokens, and in some kernels up to 64, warps share
// k: each multiplies its part of every block, and their sums are added in the order of the warps. So tiles may be
// narrow enough for their number to fill a chip evenly, and no CTA waits for another. With many tokens and warps there
// would be too many sums to add.
#pragma once

#include "../../overlap.cuh"
#include "../main_loop.cuh"
#include "../rows.cuh"
#include "streamed_store.cuh"

namespace fused_mlp::sm80 {

struct StreamedGemmArgs {
  Matrix a;
  Matrix weight;
  Matrix up_weight;
  Matrix out;
  EpilogueArgs epilogue;
  int m;
  int n;
  int k;
  int tiles_m;
  int tiles;
  bool starts_early;  // before the kernel that writes a is done
};

template <typename Element_, Product kProduct_, int kTokens_, int kColumns_, int kBlockK_, int kWarpsM_, int kWarpsK_,
          int kCtas_, int kStages_>
struct StreamedGemm {
  using Element = Element_;
  static constexpr Product kProduct = kProduct_;
  static constexpr bool kGated = kProduct == Product::kGated;
  static constexpr int kParts = kGated ? 2 : 1;  // gate and up
  static constexpr int kTokens = kTokens_;
  static constexpr int kColumns = kColumns_;  // columns of the output, which are rows of each weight
  using Tile = CtaTile<Element, kParts * kColumns, kTokens, kBlockK_, kWarpsM_, 1, kWarpsK_, kStages_>;

  static constexpr Shape kShape =
      streamed_shape(kParts, kTokens, kColumns, kBlockK_, kWarpsM_, kWarpsK_, kCtas_, kStages_);
  static constexpr int kTokensOfRound = streamed_round(kTokens);
  static constexpr int kSumStride = streamed_sum_stride(kShape);
  static constexpr int kSharedBytes = streamed_shared_bytes(kShape);
  static_assert(kTokens % kTokensOfRound == 0);

  // Rows of one weight that lie behind each other in a tile, before those of the other for the same columns. A warp
  // that has all of k has both, so that it can multiply them.
  static constexpr bool kSharesK = kWarpsK_ > 1;
  static constexpr int kRun = kSharesK || !kGated ? kColumns : Tile::kWarpRowsM / 2;
  static_assert(kRun % kMmaM == 0);
  using Args = StreamedGemmArgs;
};

// A tile of a product whose rows all have the same weights.
template <typename Gemm>
struct DenseTile {
  using Element = typename Gemm::Element;
  const StreamedGemmArgs& args;
  int token, column;  // the first

  __device__ __forceinline__ int tokens() const { return args.m - token; }
  __device__ __forceinline__ const Element* token_row(int row) const {
    return row_of<Element>(args.a, token + row, args.m);
  }
  __device__ __forceinline__ const Element* weight_row(Operand operand, int row) const {
    return row_of<Element>(operand == Operand::kUp ? args.up_weight : args.weight, column + row, args.n);
  }
  __device__ __forceinline__ int64_t out_row(int row) const { return token + row; }
  __device__ __forceinline__ const void* bias(Operand operand) const {
    return operand == Operand::kUp ? args.epilogue.up_bias : args.epilogue.bias;
  }
  __device__ __forceinline__ bool is_biased(Operand operand) const { return bias(operand) != nullptr; }
  // Those of two adjacent columns, the first of which is even.
  __device__ __forceinline__ float2 biases(Operand operand, int at) const {
    return to_float2(load_bias_pair<Element>(bias(operand), at, args.n));
  }
  __device__ __forceinline__ float bounded(Operand, float sum) const { return sum; }
};

template <typename Gemm>
struct DenseTiles {
  const StreamedGemmArgs& args;

  __device__ __forceinline__ int count() const { return args.tiles; }
  __device__ __forceinline__ DenseTile<Gemm> at(int index) const {
    return {args, index % args.tiles_m * Gemm::kTokens, index / args.tiles_m * Gemm::kColumns};
  }
  // Called for a tile before its blocks of k are multiplied.
  __device__ __forceinline__ void prefetch(int index) const {
    if constexpr (!Gemm::kGated) {
      prefetch_biases<typename Gemm::Element>(args.epilogue, at(index).column, Gemm::kColumns, args.n);
    }
  }
};

// The copies, which run ahead of the products from tile to tile.
template <typename Gemm, typename Tiles>
struct StreamedCopies {
  using Element = typename Gemm::Element;
  using Tile = typename Gemm::Tile;
  using Weights = SideLoader<Tile, Tile::kRowsM>;
  using Tokens = SideLoader<Tile, Tile::kRowsN, true>;

  const StreamedGemmArgs& args;
  const Tiles& tiles;
  int tile;
  int first;  // block of a tile that is copied, by where it begins
  int begin;  // where the next block begins
  Weights weights;
  Tokens tokens;

  __device__ __forceinline__ StreamedCopies(const StreamedGemmArgs& args, const Tiles& tiles, int tile)
      : StreamedCopies(args, tiles, tile, tiles.at(tile)) {}

  // CTAs of gated products begin at different blocks: not all read the same lines of a, and of the memory's channels,
  // at a time. Plain ones, with fewer and longer rows, are slower so.
  __device__ __forceinline__ static int first_block(const StreamedGemmArgs& args) {
    return Gemm::kGated ? blockIdx.x % ((args.k + Tile::kBlockK - 1) / Tile::kBlockK) * Tile::kBlockK : 0;
  }

  template <typename Place>
  __device__ __forceinline__ static Weights weights_of(const Place& place) {
    return Weights([&](int row) {
      const bool up = Gemm::kGated && row / Gemm::kRun % 2 == 1;
      const int runs = row / Gemm::kRun / Gemm::kParts;  // runs of both weights, before this row's
      return place.weight_row(up ? Operand::kUp : Operand::kGate, runs * Gemm::kRun + row % Gemm::kRun);
    });
  }
  template <typename Place>
  __device__ __forceinline__ static Tokens tokens_of(const Place& place) {
    return Tokens([&](int row) { return place.token_row(row); }, place.tokens());
  }

  // Starts those of the next block, if there is one.
  template <bool kOfWeights, bool kOfTokens>
  __device__ __forceinline__ void start_some(uint32_t stage) {
    if (tile < tiles.count()) {
      if (kOfWeights) weights.template load<1>(stage, begin, args.k, 0);
      if (kOfTokens) tokens.template load<1>(stage + Tile::kRowsM * Tile::kRowBytes, begin, args.k, 0);
      begin += Tile::kBlockK;
      if (begin >= args.k) begin = 0;
      if (begin == first) {
        tile += gridDim.x;
        if (tile < tiles.count()) {
          const auto place = tiles.at(tile);
          weights = weights_of(place);
          tokens = tokens_of(place);
        }
      }
    }
  }

  // They are a group also where there is no next block: so that the number of groups behind a block's is always the
  // same.
  __device__ __forceinline__ void start(uint32_t stage) {
    start_some<true, true>(stage);
    cp_async_commit();
  }

  // Starts those of the first blocks, for all stages but one. Only weights are read until the kernel that writes a is
  // done.
  __device__ __forceinline__ void fill(uint32_t ring) {
    constexpr int kFilled = Tile::kStages - 1;
    if (!args.starts_early) {
#pragma unroll 1
      for (int stage = 0; stage < kFilled; ++stage) start(ring + stage * Tile::kStageBytes);
      return;
    }
    StreamedCopies ahead = *this;
#pragma unroll 1
    for (int stage = 0; stage < kFilled; ++stage) {
      ahead.template start_some<true, false>(ring + stage * Tile::kStageBytes);
    }
    wait_for_previous_kernel();
#pragma unroll 1
    for (int stage = 0; stage < kFilled; ++stage) {
      start_some<false, true>(ring + stage * Tile::kStageBytes);
      cp_async_commit();
    }
  }

 private:
  template <typename Place>
  __device__ __forceinline__ StreamedCopies(const StreamedGemmArgs& args, const Tiles& tiles, int tile,
                                            const Place& place)
      : args(args),
        tiles(tiles),
        tile(tile),
        first(first_block(args)),
        begin(first),
        weights(weights_of(place)),
        tokens(tokens_of(place)) {}
};

// Computes every gridDim.x-th tile from the CTA's on, of which there is one.
template <typename Gemm, typename Tiles>
__device__ __forceinline__ void stream(const typename Gemm::Args& args, const Tiles& tiles) {
  using Tile = typename Gemm::Tile;
  extern __shared__ __align__(128) uint8_t raw_shared[];
  const uint32_t ring = shared_address(raw_shared);
  const uint32_t shared_sums = ring + Tile::kShape.ring_bytes();
  const auto after = [&](uint32_t stage) {
    return stage + Tile::kStageBytes == shared_sums ? ring : stage + Tile::kStageBytes;
  };
  const WarpPlace<Tile> place(__shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0));
  const FragmentReader<Tile> reader(place);

  tiles.prefetch(blockIdx.x);
  StreamedCopies<Gemm, Tiles> copies(args, tiles, blockIdx.x);
  copies.fill(ring);
  uint32_t reading = ring;
  uint32_t writing = ring + (Tile::kStages - 1) * Tile::kStageBytes;
#pragma unroll 1
  for (int tile = blockIdx.x; tile < tiles.count(); tile += gridDim.x) {
    if (tile + static_cast<int>(gridDim.x) < tiles.count()) tiles.prefetch(tile + gridDim.x);
    const auto output = tiles.at(tile);
    Accumulator<Tile> sums;
    clear<Tile>(sums);
#pragma unroll 1
    for (int begin = 0; begin < args.k; begin += Tile::kBlockK) {
      cp_async_wait<Tile::kStages - 2>();
      cta_sync();  // the block is there, and all warps are done with the one before it
      copies.start(writing);
      writing = after(writing);
#pragma unroll
      for (int step = 0; step < Tile::kSteps; ++step) {
        Fragments<Tile> fragments;
        reader.read(fragments, reading, step);
        multiply_step<Tile>(sums, fragments);
      }
      reading = after(reading);
    }
    if constexpr (Gemm::kSharesK) {
      add_and_store<Gemm>(shared_sums, args, sums, place, output);
    } else {
      store_sums<Gemm>(args, sums, place, output);
    }
  }
  cp_async_wait<0>();
}

template <typename Gemm>
__global__ void __launch_bounds__(Gemm::Tile::kThreads, Gemm::kShape.ctas)
    streamed_gemm_kernel(const __grid_constant__ StreamedGemmArgs args) {
  if constexpr (Gemm::kSharedBytes <= kSharedLimit) {
    allow_next_kernel();
    stream<Gemm>(args, DenseTiles<Gemm>{args});
  } else {
    __trap();
  }
}

}  // namespace fused_mlp::sm80
