// The stores of streamed_gemm.cuh's tiles: sums of warps that share k meet in shared memory, some tokens at a
// time; those of a warp that has all of k go from its registers. Where a tile's results go, and what is added to its
// sums, its Output says: DenseTile (streamed_gemm.cuh), or GroupedTile (grouped.cuh).
#pragma once

#include "../../gemm/epilogue.cuh"
#include "../main_loop.cuh"

namespace fused_mlp::sm80 {

// The place of the sums of the warps that share a part of k, for a token, from those of the tile's first weight row on.
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
template <typename Gemm, typename Output, typename Take>
__device__ __forceinline__ void add_up(uint32_t shared, const Output& output, Operand operand, int token, int row,
                                       int column, Take&& take) {
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
  if (output.is_biased(operand)) {
#pragma unroll
    for (int i = 0; i < kPiece; i += 2) {
      const float2 pair = output.biases(operand, column + i);
      total[i] += pair.x, total[i + 1] += pair.y;
    }
  }
#pragma unroll
  for (int i = 0; i < kPiece; ++i) take(i, output.bounded(operand, total[i]));
}

// Stores the tokens from `first` on, whose sums are in shared memory: eight columns of a token at a time.
template <typename Gemm, typename Output>
__device__ __forceinline__ void store_tokens(uint32_t shared, const typename Gemm::Args& args, const Output& output,
                                             int first) {
  using Element = typename Gemm::Element;
  constexpr int kPieces = Gemm::kColumns / kPiece;
  for (int index = threadIdx.x; index < Gemm::kTokensOfRound * kPieces; index += Gemm::Tile::kThreads) {
    const int token = index / kPieces;
    const int row = index % kPieces * kPiece;
    const int column = output.column + row;
    if (first + token >= output.tokens() || column >= args.n) continue;
    const auto sums = [&](Operand operand, auto&& take) {
      const int weight_row = operand == Operand::kGate ? row : Gemm::kColumns + row;
      add_up<Gemm>(shared, output, operand, token, weight_row, column, take);
    };
    float value[kPiece];
    GluEpilogue<Gemm::kProduct>::apply(value, CodedActivation<Element>{args.epilogue.activation}, sums);
    const int64_t out_row = output.out_row(first + token);
    Element* out = static_cast<Element*>(args.out.data) + out_row * args.out.row_stride + column;
    const auto pair = [&](int i) {
      return with_addend<Element, Gemm::kProduct>(args.epilogue, round_pair<Element>(value[i], value[i + 1]), out_row,
                                                  column + i);
    };
    *reinterpret_cast<uint4*>(out) = make_uint4(pair(0), pair(2), pair(4), pair(6));
  }
}

// Stores a tile of warps that share k.
template <typename Gemm, typename Output>
__device__ __forceinline__ void add_and_store(uint32_t shared, const typename Gemm::Args& args,
                                              const Accumulator<typename Gemm::Tile>& sums,
                                              const WarpPlace<typename Gemm::Tile>& warp, const Output& output) {
#pragma unroll
  for (int first = 0; first < Gemm::kTokens; first += Gemm::kTokensOfRound) {
    if (first > 0) cta_sync();  // the sums before have been read
    lay_down<Gemm>(shared, sums, warp, first);
    cta_sync();
    store_tokens<Gemm>(shared, args, output, first);
  }
}

// Stores a tile of warps that have all of k. A lane's sums are two tokens of a column each; transposed, they are two
// columns of a token.
template <typename Gemm, typename Output>
__device__ __forceinline__ void store_sums(const typename Gemm::Args& args,
                                           const Accumulator<typename Gemm::Tile>& sums,
                                           const WarpPlace<typename Gemm::Tile>& warp, const Output& output) {
  using Element = typename Gemm::Element;
  using Tile = typename Gemm::Tile;
  constexpr int kTiles = Tile::kTilesM / Gemm::kParts;  // tiles of columns
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    const int column = output.column + (warp.m * kTiles + i) * kMmaM;
    float value[Tile::kTilesN * 4];
    const auto sums_of = [&](Operand operand, auto&& take) {
      const bool up = operand == Operand::kUp;
      float bias[2] = {};
      if (output.is_biased(operand)) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int place = column + half * 8 + lane / 4;
          const float2 pair = output.biases(operand, place / 2 * 2);
          bias[half] = place % 2 == 0 ? pair.x : pair.y;
        }
      }
#pragma unroll
      for (int j = 0; j < Tile::kTilesN; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          take(j * 4 + c, output.bounded(operand, sums[up ? kTiles + i : i][j][c] + bias[c / 2]));
        }
      }
    };
    GluEpilogue<Gemm::kProduct>::apply(value, CodedActivation<Element>{args.epilogue.activation}, sums_of);
#pragma unroll
    for (int j = 0; j < Tile::kTilesN; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t bits = transposed(round_pair<Element>(value[j * 4 + half * 2], value[j * 4 + half * 2 + 1]));
        const int token = j * kMmaN + lane / 4;
        const int place = column + half * 8 + lane % 4 * 2;
        if (token < output.tokens() && place < args.n) {
          const int64_t row = output.out_row(token);
          *reinterpret_cast<uint32_t*>(static_cast<Element*>(args.out.data) + row * args.out.row_stride + place) =
              with_addend<Element, Gemm::kProduct>(args.epilogue, bits, row, place);
        }
      }
    }
  }
}

}  // namespace fused_mlp::sm80
