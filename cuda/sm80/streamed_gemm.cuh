// The GEMM for few rows of a. Its time is that of reading the weights, which pass through shared memory once for each
// tile of rows. Weight rows are the M side of the products, and the rows of a (tokens) are the N side, 8 at least: so
// no part of the weights' 16 rows is wasted.
//
// CTAs are persistent, and their copies run ahead of their products by the whole ring, also from one tile to the next:
// they go on while the sums of a tile are added and stored. The warps share k: each multiplies its part of
// every block, and their sums are added in the order of the warps. So tiles may be narrow enough for their number to
// fill a chip evenly, and no CTA waits for another.
#pragma once

#include "../gemm/epilogue.cuh"
#include "main_loop.cuh"
#include "rows.cuh"

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
};

template <typename Element_, Product kProduct_, int kTokens_, int kColumns_, int kBlockK_, int kWarpsM_, int kWarpsK_,
          int kCtas_, int kStages_>
struct StreamedGemm {
  using Element = Element_;
  static constexpr Product kProduct = kProduct_;
  static constexpr bool kGated = kProduct == Product::kGated;
  static constexpr int kParts = kGated ? 2 : 1;  // gate and up
  static constexpr int kTokens = kTokens_;
  static constexpr int kColumns = kColumns_;  // of the output, which are rows of each weight
  using Tile = CtaTile<Element, kParts * kColumns, kTokens, kBlockK_, kWarpsM_, 1, kWarpsK_, kStages_>;

  static constexpr Shape kShape =
      streamed_shape(kParts, kTokens, kColumns, kBlockK_, kWarpsM_, kWarpsK_, kCtas_, kStages_);
  static constexpr int kTokensOfRound = streamed_round(kTokens);
  static constexpr int kSumStride = streamed_sum_stride(kShape);
  static constexpr int kSharedBytes = streamed_shared_bytes(kShape);
  static_assert(kTokens % kTokensOfRound == 0);
};

// The copies, which run ahead of the products from tile to tile.
template <typename Gemm>
struct StreamedCopies {
  using Element = typename Gemm::Element;
  using Tile = typename Gemm::Tile;
  using Weights = SideLoader<Tile, Tile::kRowsM>;
  using Tokens = SideLoader<Tile, Tile::kRowsN, true>;

  const StreamedGemmArgs& args;
  int tile;
  int begin = 0;  // of the next block of the tile
  Weights weights;
  Tokens tokens;

  __device__ __forceinline__ StreamedCopies(const StreamedGemmArgs& args, int tile)
      : args(args), tile(tile), weights(weights_of(args, tile)), tokens(tokens_of(args, tile)) {}

  __device__ __forceinline__ static int first_column(const StreamedGemmArgs& args, int tile) {
    return tile / args.tiles_m * Gemm::kColumns;
  }
  __device__ __forceinline__ static int first_token(const StreamedGemmArgs& args, int tile) {
    return tile % args.tiles_m * Gemm::kTokens;
  }
  __device__ __forceinline__ static Weights weights_of(const StreamedGemmArgs& args, int tile) {
    const int column = first_column(args, tile);
    return Weights([&](int row) {
      const Matrix& weight = row < Gemm::kColumns ? args.weight : args.up_weight;
      return row_of<Element>(weight, column + row % Gemm::kColumns, args.n);
    });
  }
  __device__ __forceinline__ static Tokens tokens_of(const StreamedGemmArgs& args, int tile) {
    const int token = first_token(args, tile);
    return Tokens([&](int row) { return row_of<Element>(args.a, token + row, args.m); }, args.m - token);
  }

  // Starts those of the next block, if there is one. They are a group in any case: so that the number of groups behind
  // a block's is always the same.
  __device__ __forceinline__ void start(uint32_t stage) {
    if (tile < args.tiles) {
      weights.template load<1>(stage, begin, args.k, 0);
      tokens.template load<1>(stage + Tile::kRowsM * Tile::kRowBytes, begin, args.k, 0);
      begin += Tile::kBlockK;
      if (begin >= args.k) {
        begin = 0;
        tile += gridDim.x;
        if (tile < args.tiles) {
          weights = weights_of(args, tile);
          tokens = tokens_of(args, tile);
        }
      }
    }
    cp_async_commit();
  }
};

// Where the sums of the warps that share a part of k lie for a token, from those of the tile's first weight row on.
template <typename Gemm>
__device__ __forceinline__ uint32_t sums_place(uint32_t sums, int warp_k, int token) {
  return sums + (warp_k * Gemm::kTokensOfRound + token) * Gemm::kSumStride * 4;
}

// Writes the warp's sums of the tokens from `first` on to shared memory.
template <typename Gemm>
__device__ __forceinline__ void lay_down(uint32_t shared, const Accumulator<typename Gemm::Tile>& sums,
                                         const WarpPlace<typename Gemm::Tile>& warp, int first) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < Gemm::Tile::kTilesM; ++i) {
#pragma unroll
    for (int j = 0; j < Gemm::kTokensOfRound / kMmaN; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int row = warp.m * Gemm::Tile::kWarpRowsM + i * kMmaM + c / 2 * 8 + lane / 4;
        const int token = j * kMmaN + lane % 4 * 2 + c % 2;
        store_shared_float(sums_place<Gemm>(shared, warp.k, token) + row * 4, sums[i][first / kMmaN + j][c]);
      }
    }
  }
}

// Adds the warps' sums, of eight adjacent columns of a token and their bias, in the order of the warps. Calls
// take(i, sum) for each column.
template <typename Gemm, typename Take>
__device__ __forceinline__ void add_up(uint32_t shared, const StreamedGemmArgs& args, const void* bias, int token,
                                       int row, int column, Take&& take) {
  float total[kPiece] = {};
#pragma unroll
  for (int warp = 0; warp < Gemm::Tile::kWarpsK; ++warp) {
    const uint32_t place = sums_place<Gemm>(shared, warp, token) + row * 4;
#pragma unroll
    for (int i = 0; i < kPiece; i += 4) {
      const float4 v = load_shared_float4(place + i * 4);
      total[i] += v.x, total[i + 1] += v.y, total[i + 2] += v.z, total[i + 3] += v.w;
    }
  }
  if (bias != nullptr) {
#pragma unroll
    for (int i = 0; i < kPiece; i += 2) {
      const float2 pair = to_float2(load_bias_pair<typename Gemm::Element>(bias, column + i, args.n));
      total[i] += pair.x, total[i + 1] += pair.y;
    }
  }
#pragma unroll
  for (int i = 0; i < kPiece; ++i) take(i, total[i]);
}

// Stores the tokens whose sums are in shared memory: eight columns of a token at a time.
template <typename Gemm>
__device__ __forceinline__ void store_tokens(uint32_t shared, const StreamedGemmArgs& args, int first_token,
                                             int first_column) {
  using Element = typename Gemm::Element;
  constexpr int kPieces = Gemm::kColumns / kPiece;
  for (int index = threadIdx.x; index < Gemm::kTokensOfRound * kPieces; index += Gemm::Tile::kThreads) {
    const int token = index / kPieces;
    const int row = index % kPieces * kPiece;
    const int column = first_column + row;
    if (first_token + token >= args.m || column >= args.n) continue;
    const auto sums = [&](Operand operand, auto&& take) {
      if (operand == Operand::kGate) {
        add_up<Gemm>(shared, args, args.epilogue.bias, token, row, column, take);
      } else {
        add_up<Gemm>(shared, args, args.epilogue.up_bias, token, Gemm::kColumns + row, column, take);
      }
    };
    float value[kPiece];
    GluEpilogue<Gemm::kProduct>::apply(value, CodedActivation<Element>{args.epilogue.activation}, sums);
    Element* out = static_cast<Element*>(args.out.data) + (first_token + token) * args.out.row_stride + column;
    *reinterpret_cast<uint4*>(out) =
        make_uint4(round_pair<Element>(value[0], value[1]), round_pair<Element>(value[2], value[3]),
                   round_pair<Element>(value[4], value[5]), round_pair<Element>(value[6], value[7]));
  }
}

template <typename Gemm>
__global__ void __launch_bounds__(Gemm::Tile::kThreads, Gemm::kShape.ctas)
    streamed_gemm_kernel(const __grid_constant__ StreamedGemmArgs args) {
  if constexpr (Gemm::kSharedBytes <= kSharedLimit) {
    using Tile = typename Gemm::Tile;
    using Copies = StreamedCopies<Gemm>;
    extern __shared__ __align__(128) uint8_t raw_shared[];
    const uint32_t ring = shared_address(raw_shared);
    const uint32_t shared_sums = ring + Tile::kShape.ring_bytes();
    const auto after = [&](uint32_t stage) {
      return stage + Tile::kStageBytes == shared_sums ? ring : stage + Tile::kStageBytes;
    };
    const WarpPlace<Tile> place(__shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0));
    const FragmentReader<Tile> reader(place);

    Copies copies(args, blockIdx.x);
#pragma unroll 1
    for (int stage = 0; stage < Tile::kStages - 1; ++stage) copies.start(ring + stage * Tile::kStageBytes);
    uint32_t reading = ring;
    uint32_t writing = ring + (Tile::kStages - 1) * Tile::kStageBytes;
#pragma unroll 1
    for (int tile = blockIdx.x; tile < args.tiles; tile += gridDim.x) {
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
#pragma unroll
      for (int first = 0; first < Gemm::kTokens; first += Gemm::kTokensOfRound) {
        if (first > 0) cta_sync();  // the sums before have been read
        lay_down<Gemm>(shared_sums, sums, place, first);
        cta_sync();
        store_tokens<Gemm>(shared_sums, args, Copies::first_token(args, tile) + first,
                           Copies::first_column(args, tile));
      }
    }
    cp_async_wait<0>();
  } else {
    __trap();
  }
}

}  // namespace fused_mlp::sm80
