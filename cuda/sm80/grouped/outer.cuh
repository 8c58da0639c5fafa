// Every expert's product of its rows of a, transposed, with those of b: the gradients of experts' weights. Both sides
// of the tensor cores' instructions are read as they lie, and k runs through an expert's rows.
#pragma once

#include "../../gemm/grouped.h"
#include "../../gemm/tile_order.cuh"
#include "../dense/tiled_gemm.cuh"

namespace fused_mlp::sm80 {

// `a` is [rows, m] and `weight` [rows, n]; `out` is [experts, m, n].
struct OuterArgs : TiledGemmArgs {
  const RowRange* rows;  // of every expert
  int tiles;             // of all experts
};

template <typename Element_>
struct OuterGemm : TiledGemm<Element_, Product::kPlain, 128, 128, 32, 2, 2, 3> {
  using Args = OuterArgs;
  using Tile = CtaTile<Element_, 128, 128, 32, 2, 2, 1, 3, true, true>;
  static_assert(OuterGemm::kSharedBytes <= kLeastSharedOfCta);
};

// A tile of an expert's product, and the rows of this expert.
struct OuterTile {
  int expert, row, column;
  RowRange rows;

  __device__ __forceinline__ OuterTile(const OuterArgs& args, int index, int tile_rows, int tile_columns) {
    const int tiles = args.tiles_m * args.tiles_n;
    const int2 at = grouped_tile<8>(index % tiles, args.tiles_m, args.tiles_n);
    expert = index / tiles;
    row = at.x * tile_rows, column = at.y * tile_columns;
    rows = {__ldg(&args.rows[expert].first), __ldg(&args.rows[expert].count)};
  }
};

// The copies of the tile's columns of a side. The last columns stand for those past the end.
template <typename Tile, int kColumns>
__device__ __forceinline__ auto columns_of(Matrix side, const OuterTile& tile, int column, int columns) {
  using Loader = LyingLoader<Tile, kColumns>;
  side.data = static_cast<typename Tile::Element*>(side.data) + tile.rows.first * side.row_stride;
  return Loader(side, min(column + Loader::piece() * kPiece, columns - kPiece));
}

// CTAs are persistent: k is short, so that the next tile's first blocks come while a tile is stored.
template <typename Gemm>
__global__ void __launch_bounds__(Gemm::kThreads, Gemm::kCtasPerMultiprocessor)
    outer_kernel(const __grid_constant__ OuterArgs args) {
  using Tile = typename Gemm::Tile;
  extern __shared__ __align__(128) uint8_t raw_shared[];
  const uint32_t ring = shared_address(raw_shared), biases = ring + Tile::kShape.ring_bytes();
  const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);  // the compiler knows that all lanes have the same
  const WarpPlace<Tile> place(warp);
  for (int row = threadIdx.x * 2; row < Gemm::kRowsN; row += Gemm::kThreads * 2) store_shared(biases + row * 2, 0);
  int index = blockIdx.x;
  OuterTile tile(args, index, Gemm::kBlockM, Gemm::kColumns);
  auto side_m = columns_of<Tile, Tile::kRowsM>(args.a, tile, tile.row, args.m);
  auto side_n = columns_of<Tile, Tile::kRowsN>(args.weight, tile, tile.column, args.n);
  fill<Tile>(ring, side_m, side_n, tile.rows.count);
#pragma unroll 1
  while (true) {
    Accumulator<Tile> sums;
    clear<Tile>(sums);
    multiply<Tile>(ring, side_m, side_n, place, tile.rows.count, sums);
    const int first_row = tile.expert * args.m + tile.row + place.m * Tile::kWarpRowsM;
    const int end_row = (tile.expert + 1) * args.m;
    const int first_column = tile.column + place.n * Gemm::kWarpColumns;
    index += gridDim.x;
    const bool more = index < args.tiles;
    if (more) {
      tile = OuterTile(args, index, Gemm::kBlockM, Gemm::kColumns);
      side_m = columns_of<Tile, Tile::kRowsM>(args.a, tile, tile.row, args.m);
      side_n = columns_of<Tile, Tile::kRowsN>(args.weight, tile, tile.column, args.n);
      fill<Tile>(ring, side_m, side_n, tile.rows.count);
    }
    const uint32_t store = ring + (Tile::kStages - 1) * Tile::kStageBytes + warp * Gemm::kStoreBytes;
    store_tile<Gemm>(args, sums, biases, store, first_row, end_row, first_column);
    if (!more) break;
  }
}

}  // namespace fused_mlp::sm80
