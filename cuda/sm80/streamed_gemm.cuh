// The GEMM for few rows of a. Its time is that of reading the weights, which pass through shared memory once for each
// tile of rows. Weight rows are the M side of the products, and the rows of a (tokens) are the N side, 8 at least: so
// no part of the weights' 16 rows is wasted.
//
// The warps of a CTA share k: each multiplies its part of every block, and their sums are added in the order of the
// warps. So tiles may be narrow enough for their number to fill a chip, and no CTA waits for another.
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
};

template <typename Element_, Product kProduct_, int kTokens_, int kColumns_, int kBlockK_, int kStages_>
struct StreamedGemm {
  using Element = Element_;
  static constexpr Product kProduct = kProduct_;
  static constexpr bool kGated = kProduct == Product::kGated;
  static constexpr int kParts = kGated ? 2 : 1;  // gate and up
  static constexpr int kTokens = kTokens_;
  static constexpr int kColumns = kColumns_;  // of the output, which are rows of each weight
  using Tile = CtaTile<Element, kParts * kColumns, kTokens, kBlockK_, 1, 1, kStreamedWarps, kStages_>;

  // The sums of some tokens at a time are laid down where the ring was.
  static constexpr int kTokensOfRound = kTokens < 32 ? kTokens : 32;
  static constexpr int kSumStride = Tile::kRowsM + 4;  // floats; the padding keeps a warp's lanes on distinct banks
  static constexpr int kSumBytes = kStreamedWarps * kTokensOfRound * kSumStride * 4;
  static constexpr int kSharedBytes = streamed_shared_bytes(Tile::kShape);
  static constexpr int kCtasPerMultiprocessor = kSharedBytes + kSystemBytes > kLeastSharedOfMultiprocessor / 2 ? 1 : 2;
  static_assert(kSumBytes <= kSharedBytes && kTokens % kTokensOfRound == 0);
};

// Where the sums of a warp for a token lie, from those of the tile's first weight row on.
template <typename Gemm>
__device__ __forceinline__ uint32_t sums_place(uint32_t shared, int warp, int token) {
  return shared + (warp * Gemm::kTokensOfRound + token) * Gemm::kSumStride * 4;
}

// Writes the warp's sums of the tokens from `first` on to shared memory.
template <typename Gemm>
__device__ __forceinline__ void lay_down(uint32_t shared, const Accumulator<typename Gemm::Tile>& sums, int warp,
                                         int first) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < Gemm::Tile::kTilesM; ++i) {
#pragma unroll
    for (int j = 0; j < Gemm::kTokensOfRound / kMmaN; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int row = i * kMmaM + c / 2 * 8 + lane / 4;
        const int token = j * kMmaN + lane % 4 * 2 + c % 2;
        store_shared_float(sums_place<Gemm>(shared, warp, token) + row * 4, sums[i][first / kMmaN + j][c]);
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
  for (int warp = 0; warp < kStreamedWarps; ++warp) {
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
__global__ void __launch_bounds__(Gemm::Tile::kThreads, Gemm::kCtasPerMultiprocessor)
    streamed_gemm_kernel(const __grid_constant__ StreamedGemmArgs args) {
  using Element = typename Gemm::Element;
  using Tile = typename Gemm::Tile;
  extern __shared__ __align__(128) uint8_t raw_shared[];
  const uint32_t shared = shared_address(raw_shared);
  const int first_column = blockIdx.x / args.tiles_m * Gemm::kColumns;
  const int first_token = blockIdx.x % args.tiles_m * Gemm::kTokens;
  const WarpPlace<Tile> place(__shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0));

  const SideLoader<Tile, Tile::kRowsM> weights([&](int row) {
    const Matrix& weight = row < Gemm::kColumns ? args.weight : args.up_weight;
    return row_of<Element>(weight, first_column + row % Gemm::kColumns, args.n);
  });
  const SideLoader<Tile, Tile::kRowsN> tokens(
      [&](int row) { return row_of<Element>(args.a, first_token + row, args.m); });
  Accumulator<Tile> sums;
  multiply<Tile>(shared, weights, tokens, place, args.k, sums);
#pragma unroll
  for (int first = 0; first < Gemm::kTokens; first += Gemm::kTokensOfRound) {
    if (first > 0) cta_sync();  // the sums before have been read
    lay_down<Gemm>(shared, sums, place.k, first);
    cta_sync();
    store_tokens<Gemm>(shared, args, first_token + first, first_column);
  }
}

}  // namespace fused_mlp::sm80
