// Products whose rows are grouped by weights: the two layers of the experts of a mixture, and the sum behind them.
// Plain C++, as problem.h.
#pragma once

#include "problem.h"

namespace fused_mlp {

// Who chose which expert. A slot is one of the choices of a token: slot t top_k + i is the i-th of token t.
struct Routes {
  const void* index;  // [slots], signed integers: an expert each. What names none is skipped
  int index_bytes;    // the size of such an integer
  int tokens;
  int top_k;
  int experts;

  FUSED_MLP_HOST_DEVICE int slots() const { return tokens * top_k; }
};

constexpr int kMaxGroupedExperts = 512;

struct RowRange {
  int first, count;
};

// The blocks that sorted rows fill.
struct RowBlocks {
  const int* codes;                // a BlockCode for every block of rows; null where there are none
  const int* count;                // how many blocks there are
  const RowRange* rows = nullptr;  // the rows of every expert, in blocks of kTiledBlock
};

// The expert of a block or tile, and how many of its rows are filled: 255 at most.
struct BlockCode {
  int code;

  static FUSED_MLP_HOST_DEVICE BlockCode of(int expert, int rows) { return {expert << 8 | rows}; }
  FUSED_MLP_HOST_DEVICE int expert() const { return code >> 8; }
  FUSED_MLP_HOST_DEVICE int rows() const { return code & 0xFF; }
};

constexpr int kFittedStep = 16;       // the height of a fitted tile is a multiple of this
constexpr int kMostFittedRows = 192;  // the greatest height of a fitted tile

// A tile of sorted rows that is as high as it has to be. All the tiles of an expert have nearly the same height.
struct alignas(16) FittedTile {
  BlockCode code;    // its expert, and how many of its rows are filled
  int first, count;  // the expert's first tile, and how many it has
  int rows;          // the first, which is a multiple of kFittedStep, plus the number of steps

  static FUSED_MLP_HOST_DEVICE FittedTile of(BlockCode code, int first, int count, int row, int steps) {
    return {code, first, count, row | steps};
  }
  FUSED_MLP_HOST_DEVICE int row() const { return rows & -kFittedStep; }
  FUSED_MLP_HOST_DEVICE int height() const { return rows % kFittedStep * kFittedStep; }
};
static_assert(kMostFittedRows < kFittedStep * kFittedStep, "the steps of a height are less than a step");

struct FittedTiles {
  const FittedTile* tiles;
  const int* count;
};

// Operands of products of training.
struct GroupedTraining {
  int experts;               // how many outer products there are
  const float* row_weights;  // gradients are multiplied by these
  // Written by gradients: for every row, the parts of the gradient of its weight, one for each kRowSumColumns columns.
  float* row_sums;
};

constexpr int kRowSumColumns = 32;

// Rows of tokens that a GEMM takes from where they lie, in the order of sorted rows.
struct RowGather {
  Matrix x;  // [tokens, k]
  int64_t k;
  const int* token_of_row;  // the token of every row of a block, filled or not
};

// A GEMM with a row of the output for every slot, by the weights of the slot's expert. In `gemm`, m is the number of
// slots; weights and biases are those of expert 0.
struct GroupedProblem {
  GemmProblem gemm;
  Routes routes;
  int slots_of_row;     // slots of a row of a: top_k where its rows are those of tokens, 1 where those of slots
  int64_t weight_rows;  // from an expert's first row of weights to the next one's, for both operands
  // Weights are [k, n], or of a gated product [k, 2 n]: gates and ups side by side, or columns of them in turns where
  // interleaved. `gemm.weight` is all of it, and so is `gemm.up_weight`.
  bool transposed, interleaved;
  // The same of the weights of gemm.low_rank, whose rows are slots, or sorted as those of a.
  int64_t low_rank_rows = 0;
  bool of_slots = false, low_rank_of_slots = false;  // weights, or those of the term: a slot's each, not an expert's
  int64_t bias_stride;                               // from an expert's first bias to the next one's, for both operands
  int64_t bias_step;                                 // from column to column
  GateLimits limits;
  RowBlocks blocks;
  FittedTiles fitted{};
  RowGather gather{};  // in the place of gemm.a, where there is a list
  bool outer = false;  // in place of all of this: every expert's a^T weight, [rows, m] and [rows, n], as [experts m, n]
  GroupedTraining training{};
};

enum class WeightType { kFloat32, kFloat64, kFloat16, kBFloat16 };

// Made for training besides, where row_weights is not null: zeros follow an expert's rows, up to a multiple of
// kZeroRows.
struct SortedTraining {
  const void* weights;  // [slots]
  WeightType type;
  float* row_weights;  // weights of the filled rows
};

constexpr int kZeroRows = 64;

// Rows of tokens to rows of slots, sorted by expert. Each expert's rows fill blocks of block_rows, the last of them in
// part: what stands in its other rows is left, but for training. Of blocks, of experts and of tiles those lists are
// written that are not null.
struct RowSort {
  Routes routes;
  Matrix x;                         // [tokens, k], 16-bit elements
  int64_t k;                        // a multiple of 8
  int block_rows;                   // at most 128
  void* sorted;                     // [blocks * block_rows, k]; null where rows are gathered
  int* row_of_slot;                 // [slots], -1 where skipped
  int* codes;                       // [blocks], of RowBlocks
  int* count;                       // how many blocks: codes and sorted have room for as many as there can be
  RowRange* rows = nullptr;         // the rows of every expert
  FittedTile* tiles = nullptr;      // where a block is a multiple of kFittedStep rows
  int* tile_count = nullptr;        // likewise
  int* token_of_row = nullptr;      // of every row of a block, filled or not
  int* taken = nullptr;             // one for each layer: set to 0
  int tile_rows = kMostFittedRows;  // of a tile, at most
  SortedTraining training{};
  int part;  // slots whose rows a CTA copies at a time; launch_row_sort() sets it
};

// out [tokens, n] = the rows of a token's slots, each times its weight, added in the order of the slots.
struct WeightedSum {
  Routes routes;
  const void* rows;  // [slots, n]; or where they were sorted, those that row_of_slot says
  const int* row_of_slot;
  const void* weights;  // [slots], or null where each counts as it is
  WeightType type;
  void* out;
  int n;  // a multiple of 8
  DType dtype;
  Matrix residual = kNoMatrix;  // is added, if there is one: rows of tokens
};

// The gradients [slots] of the weights of a WeightedSum, from what the product of gradients has written.
struct WeightGradient {
  Routes routes;
  const float* row_sums;  // [rows, parts]
  int parts;
  const int* row_of_slot;
  void* out;
  WeightType type;
};

// The tiles of a grouped product, from what the host knows.
struct GroupedPlan {
  MainLoop loop;
  bool sorts;             // rows, into blocks of a tile's height, or with `fits` of kFittedStep
  int rows;               // rows of a tile, at most
  int row_tiles;          // at most, however the slots fall on the experts
  int split_k;            // CTAs of a cluster that share a tile, each with a part of k
  int sorted_rows = 0;    // at most, where they are sorted
  bool fits = false;      // true if sorted rows are cut into fitted tiles
  bool few_rows = false;  // an expert on the fitted loop has so few that reading the weights takes the time
  bool gathers = false;   // true if the first layer takes rows of tokens from where they lie: the sort lists them
};

constexpr int kTiledBlock = 128;    // rows of a tile in training
constexpr int kSearchedSlots = 32;  // at most, where rows are not sorted: a lane for each, in every CTA
constexpr int kSortedBoxRows = 8;   // those of a swizzle's period: sorted rows come in boxes of as many

}  // namespace fused_mlp
