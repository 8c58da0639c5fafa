// The stores of a tile of sm_80's tiled GEMMs: its results, and for training also its sums.
#pragma once

#include "../../gemm/epilogue.cuh"
#include "../main_loop.cuh"
#include "../rows.cuh"

namespace fused_mlp::sm80 {

// Moves the next 16 rows' sums to the indices that the loop's body uses.
template <typename Tile>
__device__ __forceinline__ void move_up(Accumulator<Tile>& sums) {
#pragma unroll
  for (int next = 1; next < Tile::kTilesM; ++next) {
#pragma unroll
    for (int j = 0; j < Tile::kTilesN; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) sums[next - 1][j][c] = sums[next][j][c];
    }
  }
}

// Separates sums whose columns are interleaved gates and ups: first the gates, then the ups, of which each lane has two
// adjacent ones. It gets them from two other lanes of its group of four.
template <typename Tile>
__device__ __forceinline__ void part_columns(float (&sums)[Tile::kTilesN][4]) {
  constexpr int kTiles = Tile::kTilesN / 2;
  const int place = threadIdx.x % 4;
  float parted[Tile::kTilesN][4];
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int lane = threadIdx.x % 32 / 4 * 4 + (place * 2 + c % 2) % 4;
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const float even = __shfl_sync(0xFFFFFFFF, sums[2 * j][c / 2 * 2 + part], lane);
        const float odd = __shfl_sync(0xFFFFFFFF, sums[2 * j + 1][c / 2 * 2 + part], lane);
        parted[part * kTiles + j][c] = place < 2 ? even : odd;
      }
    }
  }
#pragma unroll
  for (int j = 0; j < Tile::kTilesN; ++j) {
#pragma unroll
    for (int c = 0; c < 4; ++c) sums[j][c] = parted[j][c];
  }
}

// Stores values of 16 rows of the warp's tile: in registers they are scattered over the lanes, and shared memory
// collects them into 16-byte chunks.
template <typename Gemm, int kCount>
__device__ __forceinline__ void store_rows(const typename Gemm::Args& args, const Matrix& matrix,
                                           const float (&value)[kCount], uint32_t store, int first_row, int end_row,
                                           int first_column) {
  using Element = typename Gemm::Element;
  constexpr int kPieces = Gemm::kStoreRowBytes / kPieceBytes;  // chunks of a row
  static_assert(kMmaM * kPieces % 32 == 0, "every lane stores as many pieces");
  const int lane = threadIdx.x % 32;
  warp_sync();  // all lanes have read the previous rows
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    const uint32_t place = store + swizzled<Gemm::kStoreRowBytes>(lane / 4, j) + lane % 4 * 4;
    store_shared(place, round_pair<Element>(value[j * 4], value[j * 4 + 1]));
    store_shared(place + 8 * Gemm::kStoreRowBytes, round_pair<Element>(value[j * 4 + 2], value[j * 4 + 3]));
  }
  warp_sync();
#pragma unroll
  for (int each = 0; each < kMmaM * kPieces / 32; ++each) {
    const int store_row = (each * 32 + lane) / kPieces;
    const int piece = lane % kPieces;
    const uint4 bits = load_shared_uint4(store + swizzled<Gemm::kStoreRowBytes>(store_row, piece));
    const int row = first_row + store_row;
    const int column = first_column + piece * kPiece;
    if (row < end_row && column < args.n) {
      *reinterpret_cast<uint4*>(static_cast<Element*>(matrix.data) + row * matrix.row_stride + column) = bits;
    }
  }
}

// Stores the warp's tile, 16 rows at a time, without rows from end_row. Leaves the sums undefined.
template <typename Gemm>
__device__ __forceinline__ void store_tile(const typename Gemm::Args& args, Accumulator<typename Gemm::Tile>& sums,
                                           uint32_t biases, uint32_t store, int first_row, int end_row,
                                           int first_column) {
  using Element = typename Gemm::Element;
  using Pair = typename ElementTraits<Element>::Pair;
  constexpr int kTiles = Gemm::kTilesOfPart;
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int i = 0; i < Gemm::kTilesM; ++i) {
    float value[kTiles * 4];
    if constexpr (Gemm::kGrouped) {
      if (first_row + i * Gemm::Tile::kTileStepM >= end_row) break;  // the sums do not exist there either
      if constexpr (Gemm::kGated && Gemm::Tile::kLies) {
        if (args.interleaved) part_columns<typename Gemm::Tile>(sums[0]);
      }
    }
    const auto sums_of = [&](Operand operand, auto&& take) {
      const int first = operand == Operand::kGate ? 0 : kTiles;
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        const uint32_t bits = load_shared(biases + ((first + j) * kMmaN + lane % 4 * 2) * 2);
        const float2 bias = to_float2(*reinterpret_cast<const Pair*>(&bits));
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const float sum = sums[0][first + j][c] + (c % 2 == 0 ? bias.x : bias.y);
          if constexpr (Gemm::kGrouped && Gemm::kGated) {
            take(j * 4 + c, limited(args.limits, operand, sum));
          } else {
            take(j * 4 + c, sum);
          }
        }
      }
    };
    const auto store_all = [&](const Matrix& matrix) {
      store_rows<Gemm>(args, matrix, value, store, first_row + i * Gemm::Tile::kTileStepM, end_row, first_column);
    };
    if constexpr (is_kept(Gemm::kProduct)) {
      const auto keep = [&](int each, float sum) { value[each] = sum; };
      sums_of(Operand::kGate, keep);
      store_all(args.training.gate);
      if constexpr (Gemm::kGated) {
        sums_of(Operand::kUp, keep);
        store_all(args.training.up);
      }
    }
    GluEpilogue<Gemm::kProduct>::apply(value, CodedActivation<Element>{args.epilogue.activation}, sums_of);
    store_all(args.out);
    move_up<typename Gemm::Tile>(sums);
  }
}

}  // namespace fused_mlp::sm80
