// The tiled GEMM for rows grouped by weights: the experts of a mixture, for many tokens. Rows lie in blocks of a tile's
// height, each of one expert (sorted_rows.cuh), so that tiles are those of any product, but for where their weights
// and biases begin. What is in the rows that fill up an expert's last block is computed, and read by nobody; but
// where they are half of the block, their wgmma is left out.
#pragma once

#include "../gemm/grouped.h"
#include "tiled_gemm.cuh"

namespace fused_mlp::sm90 {

struct GroupedTilesArgs : TiledGemmArgs {
  const int* block_experts;  // of every block of rows: RowSort
  const int* blocks;         // how many there are
  int weight_rows;
  int64_t bias_stride;
  int64_t bias_step;
  GateLimits limits;
};

template <typename Element, Product kProduct, int kBlockN>
struct GroupedTiles : TiledGemm<Element, kProduct, kGroupedBlock, kBlockN, Schedule::kPingPong, 1> {
  using Args = GroupedTilesArgs;
  static constexpr bool kGrouped = true;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

struct GroupedTile {
  int row;
  int column;
  int first_weight_row;
  int64_t first_bias;
  int64_t bias_step;
  bool is_half_empty;

  __device__ __forceinline__ int weight_row() const { return first_weight_row + column; }
  __device__ __forceinline__ int64_t bias_index(int at_column) const { return first_bias + at_column * bias_step; }
  __device__ __forceinline__ bool half_empty() const { return is_half_empty; }
};

struct GroupedTileOrder {
  const GroupedTilesArgs& args;
  TileOrder tiles;

  __device__ __forceinline__ int count() const { return tiles.count(); }

  template <typename Gemm>
  __device__ __forceinline__ GroupedTile tile(int index) const {
    const Tile tile = tiles.template tile<Gemm>(index);
    const int code = __ldg(args.block_experts + tile.row / Gemm::kBlockM);
    const int expert = code / 2;
    return {tile.row, tile.column, expert * args.weight_rows, expert * args.bias_stride, args.bias_step, code % 2 != 0};
  }
};

__device__ __forceinline__ GroupedTileOrder tile_order(const GroupedTilesArgs& args) {
  return {args, {args, __ldg(args.blocks), args.tiles_n}};
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace fused_mlp::sm90
