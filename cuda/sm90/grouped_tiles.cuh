// The tiled GEMM for rows grouped by weights: the experts of a mixture, for many tokens. Rows lie in blocks of a tile's
// height, each of one expert (sorted_rows.cuh), so that tiles are those of any product, but for where their weights
// and biases begin. What is in the rows that fill up an expert's last block is computed, and read by nobody; few of
// them are loaded, and where they are half of the block, their wgmma is left out. A block whose rows are all loaded
// comes as one box.
#pragma once

#include "../gemm/grouped.h"
#include "tiled_gemm.cuh"

namespace fused_mlp::sm90 {

struct GroupedTilesArgs : TiledGemmArgs {
  CUtensorMap whole_a;  // in boxes of a block
  RowBlocks blocks;
  int weight_rows;
  int64_t bias_stride;
  int64_t bias_step;
  GateLimits limits;
};

template <typename Element, Product kProduct, int kBlockN>
struct GroupedTiles : TiledGemm<Element, kProduct, kTiledBlock, kBlockN, Schedule::kPingPong, 1> {
  using Args = GroupedTilesArgs;
  static constexpr bool kGrouped = true;
  static constexpr int kBoxRowsA = 32;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

struct GroupedTile {
  int row;
  int column;
  int first_weight_row;
  int64_t first_bias;
  int64_t bias_step;
  int filled_rows;

  __device__ __forceinline__ int weight_row() const { return first_weight_row + column; }
  __device__ __forceinline__ int64_t bias_index(int at_column) const { return first_bias + at_column * bias_step; }
  __device__ __forceinline__ bool half_empty() const { return filled_rows <= kTiledBlock / 2; }
  // Filled rows, and so many more as make up the last box.
  template <typename Gemm>
  __device__ __forceinline__ int loaded_rows() const {
    return (filled_rows + Gemm::kBoxRowsA - 1) / Gemm::kBoxRowsA * Gemm::kBoxRowsA;
  }
  // In a stage, with the weights.
  template <typename Gemm>
  __device__ __forceinline__ int loaded_bytes() const {
    return loaded_rows<Gemm>() * Gemm::kBlockK * static_cast<int>(sizeof(typename Gemm::Element)) + Gemm::kBytesB;
  }
};

struct GroupedTileOrder {
  const GroupedTilesArgs& args;
  TileOrder tiles;

  __device__ __forceinline__ int count() const { return tiles.count(); }

  template <typename Gemm>
  __device__ __forceinline__ GroupedTile tile(int index) const {
    const Tile tile = tiles.template tile<Gemm>(index);
    const BlockCode code{__ldg(args.blocks.codes + tile.row / Gemm::kBlockM)};
    const int expert = code.expert();
    return {tile.row, tile.column, expert * args.weight_rows, expert * args.bias_stride, args.bias_step, code.rows()};
  }
};

__device__ __forceinline__ GroupedTileOrder tile_order(const GroupedTilesArgs& args) {
  return {args, {args, __ldg(args.blocks.count), args.tiles_n}};
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace fused_mlp::sm90
