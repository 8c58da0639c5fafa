// The GEMM for many rows: a CTA computes one tile of the output. Rows of a are the M side of the products, weight rows
// the N side.
//
// A gated product is a plain one whose weight rows come from two tensors: of each warp's weight rows, the first half
// are gate rows and the second half the up rows of the same output columns. Sums j and j + kTilesN / 2 of a thread then
// belong to gate and up of one output element.
//
// CTAs are not persistent. Most kernels are small enough that a multiprocessor holds two, and one runs its epilogue
// while the other has the tensor cores.
#pragma once

#include "../gemm/epilogue.cuh"
#include "../gemm/tile_order.cuh"
#include "main_loop.cuh"
#include "rows.cuh"

namespace fused_mlp::sm80 {

struct TiledGemmArgs {
  Matrix a;
  Matrix weight;
  Matrix up_weight;
  Matrix out;
  EpilogueArgs epilogue;
  int m;
  int n;
  int k;
  int tiles_m;
  int tiles_n;
};

template <typename Element_, Product kProduct_, int kBlockM_, int kBlockN_, int kBlockK_, int kWarpsM_, int kWarpsN_,
          int kStages_>
struct TiledGemm : CtaTile<Element_, kBlockM_, kBlockN_, kBlockK_, kWarpsM_, kWarpsN_, 1, kStages_> {
  using Tile = CtaTile<Element_, kBlockM_, kBlockN_, kBlockK_, kWarpsM_, kWarpsN_, 1, kStages_>;
  static constexpr Product kProduct = kProduct_;
  static constexpr bool kGated = kProduct == Product::kGated;
  static constexpr int kParts = kGated ? 2 : 1;  // gate and up
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kColumns = kBlockN_ / kParts;              // of the output, in a tile
  static constexpr int kWarpColumns = Tile::kWarpRowsN / kParts;  // of a warp
  static constexpr int kTilesOfPart = Tile::kTilesN / kParts;     // of a warp, 8 columns each
  static constexpr int kStoreRowBytes = kWarpColumns * 2;         // of a warp's results on their way out
  static constexpr int kStoreBytes = kMmaM * kStoreRowBytes;      // they lie where the ring was
  static constexpr int kSharedBytes = tiled_shared_bytes(Tile::kShape);
  static constexpr int kCtasPerMultiprocessor = kSharedBytes + kSystemBytes > kLeastSharedOfMultiprocessor / 2 ? 1 : 2;
  static_assert(Tile::kTilesN % kParts == 0);
  static_assert(Tile::kThreads / 32 * kStoreBytes <= Tile::kShape.ring_bytes());

  // Which weight, and which of the tile's output columns, a weight row of the tile belongs to.
  __device__ __forceinline__ static Operand operand(int row) {
    return kGated && row / kWarpColumns % 2 == 1 ? Operand::kUp : Operand::kGate;
  }
  __device__ __forceinline__ static int column(int row) {
    return row / Tile::kWarpRowsN * kWarpColumns + row % kWarpColumns;
  }
};

// Starts the copies of the biases of the tile's weight rows. Where there is none, it is zero.
template <typename Gemm>
__device__ __forceinline__ void load_biases(const TiledGemmArgs& args, uint32_t shared, int first_column) {
  using Element = typename Gemm::Element;
  for (int row = threadIdx.x * 2; row < Gemm::kRowsN; row += Gemm::kThreads * 2) {
    const void* bias = Gemm::operand(row) == Operand::kGate ? args.epilogue.bias : args.epilogue.up_bias;
    const uint32_t place = shared + row * 2;
    if (bias == nullptr) {
      store_shared(place, 0);
    } else {
      const int column = min(first_column + Gemm::column(row), args.n - 2);  // past the end nothing is stored
      cp_async_4(place, static_cast<const Element*>(bias) + column);
    }
  }
}

// Stores the warp's tile, 16 rows at a time: in registers they are scattered over the lanes, and in shared memory they
// come together in pieces of 16 bytes. Leaves the sums undefined.
template <typename Gemm>
__device__ __forceinline__ void store_tile(const TiledGemmArgs& args, Accumulator<typename Gemm::Tile>& sums,
                                           uint32_t biases, uint32_t store, int first_row, int first_column) {
  using Element = typename Gemm::Element;
  using Pair = typename ElementTraits<Element>::Pair;
  constexpr int kTiles = Gemm::kTilesOfPart;
  constexpr int kPieces = Gemm::kStoreRowBytes / kPieceBytes;  // of a row
  static_assert(kMmaM * kPieces % 32 == 0, "every lane stores as many pieces");
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int i = 0; i < Gemm::kTilesM; ++i) {
    float value[kTiles * 4];
    const auto sums_of = [&](Operand operand, auto&& take) {
      const int first = operand == Operand::kGate ? 0 : kTiles;
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        const uint32_t bits = load_shared(biases + ((first + j) * kMmaN + lane % 4 * 2) * 2);
        const float2 bias = to_float2(*reinterpret_cast<const Pair*>(&bits));
#pragma unroll
        for (int c = 0; c < 4; ++c) take(j * 4 + c, sums[0][first + j][c] + (c % 2 == 0 ? bias.x : bias.y));
      }
    };
    GluEpilogue<Gemm::kProduct>::apply(value, CodedActivation<Element>{args.epilogue.activation}, sums_of);

    warp_sync();  // all lanes have read the rows before
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
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
      const int row = first_row + i * kMmaM + store_row;
      const int column = first_column + piece * kPiece;
      if (row < args.m && column < args.n) {
        *reinterpret_cast<uint4*>(static_cast<Element*>(args.out.data) + row * args.out.row_stride + column) = bits;
      }
    }
#pragma unroll
    for (int next = 1; next < Gemm::kTilesM; ++next) {  // the next rows' sums, where the loop's body wants them
#pragma unroll
      for (int j = 0; j < Gemm::kTilesN; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) sums[next - 1][j][c] = sums[next][j][c];
      }
    }
  }
}

template <typename Gemm>
__global__ void __launch_bounds__(Gemm::kThreads, Gemm::kCtasPerMultiprocessor)
    tiled_gemm_kernel(const __grid_constant__ TiledGemmArgs args) {
  if constexpr (Gemm::kSharedBytes <= kSharedLimit) {
    using Element = typename Gemm::Element;
    using Tile = typename Gemm::Tile;
    extern __shared__ __align__(128) uint8_t raw_shared[];
    const uint32_t ring = shared_address(raw_shared);
    const uint32_t biases = ring + Tile::kShape.ring_bytes();
    const int2 tile = grouped_tile<8>(blockIdx.x, args.tiles_m, args.tiles_n);
    const int first_row = tile.x * Gemm::kBlockM;
    const int first_column = tile.y * Gemm::kColumns;
    const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);  // the compiler knows that all lanes have the same
    const WarpPlace<Tile> place(warp);

    load_biases<Gemm>(args, biases, first_column);
    const SideLoader<Tile, Tile::kRowsM> rows(
        [&](int row) { return row_of<Element>(args.a, first_row + row, args.m); });
    const SideLoader<Tile, Tile::kRowsN> weights([&](int row) {
      const Matrix& weight = Gemm::operand(row) == Operand::kGate ? args.weight : args.up_weight;
      return row_of<Element>(weight, first_column + Gemm::column(row), args.n);
    });
    Accumulator<Tile> sums;
    multiply<Tile>(ring, rows, weights, place, args.k, sums);
    store_tile<Gemm>(args, sums, biases + place.n * Tile::kWarpRowsN * 2, ring + warp * Gemm::kStoreBytes,
                     first_row + place.m * Tile::kWarpRowsM, first_column + place.n * Gemm::kWarpColumns);
  } else {
    __trap();  // rather than leave the output as it is
  }
}

}  // namespace fused_mlp::sm80
