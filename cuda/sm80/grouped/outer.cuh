// Every expert's product of its rows of a, transposed, with those of b: the gradients of experts' weights. Both sides of
// the tensor cores' instructions are read as they lie, and k runs through an expert's rows.
#pragma once

#include "../../gemm/grouped.h"
#include "../../gemm/tile_order.cuh"
#include "../dense/tiled_gemm.cuh"

namespace fused_mlp::sm80 {

// `a` is [rows, m] and `weight` [rows, n]; `out` is [experts, m, n].
struct OuterArgs : TiledGemmArgs {
  const RowRange* rows;  // of every expert
};

template <typename Element_>
struct OuterGemm : TiledGemm<Element_, Product::kPlain, 128, 128, 32, 2, 2, 3> {
  using Args = OuterArgs;
  using Tile = CtaTile<Element_, 128, 128, 32, 2, 2, 1, 3, true, true>;
  static_assert(!OuterGemm::kPersistent && OuterGemm::kSharedBytes <= kLeastSharedOfCta);
};

template <typename Gemm>
__global__ void __launch_bounds__(Gemm::kThreads, Gemm::kCtasPerMultiprocessor)
    outer_kernel(const __grid_constant__ OuterArgs args) {
  using Element = typename Gemm::Element;
  using Tile = typename Gemm::Tile;
  extern __shared__ __align__(128) uint8_t raw_shared[];
  const int tiles = args.tiles_m * args.tiles_n, expert = blockIdx.x / tiles;
  const int2 at = grouped_tile<8>(blockIdx.x % tiles, args.tiles_m, args.tiles_n);
  const int first = __ldg(&args.rows[expert].first), count = __ldg(&args.rows[expert].count);
  // The last columns stand for those past the end.
  const auto side = [&]<int kColumns>(Matrix rows, int column, int columns) {
    using Loader = LyingLoader<Tile, kColumns>;
    rows.data = static_cast<Element*>(rows.data) + first * rows.row_stride;
    return Loader(rows, min(column + Loader::piece() * kPiece, columns - kPiece));
  };
  auto side_m = side.template operator()<Tile::kRowsM>(args.a, at.x * Gemm::kBlockM, args.m);
  auto side_n = side.template operator()<Tile::kRowsN>(args.weight, at.y * Gemm::kColumns, args.n);

  const uint32_t ring = shared_address(raw_shared), biases = ring + Tile::kShape.ring_bytes();
  for (int row = threadIdx.x * 2; row < Gemm::kRowsN; row += Gemm::kThreads * 2) store_shared(biases + row * 2, 0);
  fill<Tile>(ring, side_m, side_n, count);
  Accumulator<Tile> sums;
  clear<Tile>(sums);
  const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);  // the compiler knows that all lanes have the same
  const WarpPlace<Tile> warp_place(warp);
  multiply<Tile>(ring, side_m, side_n, warp_place, count, sums);
  const uint32_t store = ring + (Tile::kStages - 1) * Tile::kStageBytes + warp * Gemm::kStoreBytes;
  store_tile<Gemm>(args, sums, biases, store,
                   expert * args.m + at.x * Gemm::kBlockM + warp_place.m * Tile::kWarpRowsM, (expert + 1) * args.m,
                   at.y * Gemm::kColumns + warp_place.n * Gemm::kWarpColumns);
}

}  // namespace fused_mlp::sm80
