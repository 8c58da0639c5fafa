// The tiled GEMM for rows grouped by weights: the experts of a mixture, for many tokens. Rows lie in blocks of a tile's
// height, each of one expert (sorted_rows.cuh), so tiles are the same as in any product, except for the position of
// their weights and biases. The rows that fill up an expert's last block are computed, but never read; few of them are
// loaded. Omitting their wgmma would let a CTA run ahead of those that share its weights in L2, and is slower. A block
// whose rows are all loaded is one box.
//
// In training the operands of a pair lie side by side: its k runs through both. A gradient's rows that are not filled
// are zeros. So are the rows of the other operand of an outer product, up to a whole step of k: its k runs through an
// expert's rows.
#pragma once

#include "../../gemm/grouped.h"
#include "../dense/tiled_gemm.cuh"

namespace fused_mlp::sm90 {

struct GroupedOperands {
  CUtensorMap whole_a;          // in boxes of a block
  CUtensorMap whole_rank_rows;  // the same, for the low-rank term
  RowBlocks blocks;
  int64_t bias_stride;  // from an expert's first bias to the next one's; its own are adjacent
  GroupedTraining training;
};

template <Product kProduct>
struct GroupedTilesArgs : std::conditional_t<is_training(kProduct), TrainingGemmArgs, TiledGemmArgs>,
                          GroupedOperands {};

template <typename Element, Product kProduct, int kBlockN>
struct GroupedTiles : TiledGemm<Element, kProduct, kTiledBlock, kBlockN, Schedule::kPingPong, 1> {
  using Args = GroupedTilesArgs<kProduct>;
  static constexpr bool kGrouped = true;
  static constexpr int kBoxRowsA = 32;
};

// Every expert's product of rows of a, transposed, with those of weights: the gradient of an expert's weights.
struct OuterTilesArgs : GroupedTilesArgs<Product::kPair> {};

template <typename Element>
struct OuterTiles : GroupedTiles<Element, Product::kPair, 192> {
  using Args = OuterTilesArgs;
  static constexpr bool kOuter = true;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

struct GroupedTile {
  int row;
  int column;
  int expert;
  int filled_rows;
  int64_t first_bias;

  __device__ __forceinline__ int64_t bias_index(int at_column) const { return first_bias + at_column; }
  // Filled rows, and the rows that complete the last box.
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

// A tile of the outer product of an expert's rows.
struct OuterTile {
  int row;  // in the output of its expert, and column of a
  int column;
  int expert;
  int first_k;
  int k_blocks;

  __device__ __forceinline__ int64_t bias_index(int at_column) const { return at_column; }
};

// Expert by expert: CTAs that run at the same time do not read the weights of two experts.
struct GroupedTileOrder {
  const TiledGemmArgs& args;
  const GroupedOperands& grouped;
  int blocks;
  int tiles_n;

  __device__ __forceinline__ int count() const { return blocks * tiles_n; }

  template <typename Gemm>
  __device__ __forceinline__ GroupedTile tile(int index) const {
    const int first_index = index / tiles_n;  // the first block's, of the same expert
    const int expert = BlockCode{__ldg(grouped.blocks.codes + first_index)}.expert();
    const RowRange* rows = grouped.blocks.rows + expert;
    const int first = __ldg(&rows->first), count = __ldg(&rows->count);
    const int2 at = grouped_tile<TileOrder::kGroupM>(index - first / kTiledBlock * tiles_n,
                                                     (count + kTiledBlock - 1) / kTiledBlock, tiles_n);
    const int row = at.x * kTiledBlock;
    return {first + row, min(at.y * Gemm::kTileN, args.last_column), expert, min(count - row, kTiledBlock),
            expert * grouped.bias_stride};
  }
};

// Expert by expert.
struct OuterTileOrder {
  const TiledGemmArgs& args;
  const GroupedOperands& grouped;
  TileOrder tiles;  // the tiles of an expert

  __device__ __forceinline__ int count() const { return grouped.training.experts * tiles.count(); }

  template <typename Gemm>
  __device__ __forceinline__ OuterTile tile(int index) const {
    const int expert = index / tiles.count();
    const Tile tile = tiles.template tile<Gemm>(index % tiles.count());
    const RowRange* rows = grouped.blocks.rows + expert;
    return {tile.row, tile.column, expert, __ldg(&rows->first),
            (__ldg(&rows->count) + Gemm::kBlockK - 1) / Gemm::kBlockK};
  }
};

template <Product kProduct>
__device__ __forceinline__ GroupedTileOrder tile_order(const GroupedTilesArgs<kProduct>& args) {
  return {args, args, __ldg(args.blocks.count), args.tiles_n};
}
__device__ __forceinline__ OuterTileOrder tile_order(const OuterTilesArgs& args) { return {args, args, {args}}; }

// Every gradient and hidden value is multiplied by its row's routing weight. Before that, their products are summed
// over these columns of a row, which is a partial sum of the gradient of the weight. Rows that are not filled are all
// zero.
template <typename Gemm>
struct GradientRows<Gemm, true> {
  const typename Gemm::Args& args;
  const GroupedTile& tile;
  float weight[2], sum[2];
  bool filled[2];

  __device__ __forceinline__ GradientRows(const typename Gemm::Args& args, const GroupedTile& tile)
      : args(args), tile(tile) {}

  // Row i of this thread, counted from `row`.
  __device__ __forceinline__ static int at(int row, int i) { return row + i * 8 + threadIdx.x % 32 / 4; }

  __device__ __forceinline__ void begin(int row) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      filled[i] = at(row, i) < tile.row + tile.filled_rows;
      weight[i] = filled[i] ? __ldg(args.training.row_weights + at(row, i)) : 0.0f;
      sum[i] = 0.0f;
    }
  }

  __device__ __forceinline__ float scaled(int i, float value) const { return value * weight[i]; }
  __device__ __forceinline__ void add(int i, float gradient, float value) { sum[i] = fmaf(gradient, value, sum[i]); }

  __device__ __forceinline__ uint32_t kept(int i, uint32_t bits) const { return filled[i] ? bits : 0; }

  __device__ __forceinline__ void end(int row, int column) {
    static_assert(Gemm::kStepN == kRowSumColumns);
    const int parts = (args.n + kRowSumColumns - 1) / kRowSumColumns, part = column / kRowSumColumns;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[i] += __shfl_xor_sync(0xFFFFFFFF, sum[i], 1);
      sum[i] += __shfl_xor_sync(0xFFFFFFFF, sum[i], 2);
      if (threadIdx.x % 4 == 0 && filled[i] && part < parts) {
        args.training.row_sums[int64_t{at(row, i)} * parts + part] = sum[i];
      }
    }
  }
};

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace fused_mlp::sm90
