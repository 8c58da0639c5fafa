// Products whose rows are grouped by weights: the two layers of the experts of a mixture, and the sum after them. Plain
// C++, like problem.h.
#pragma once

#include "problem.h"

namespace fused_mlp {

// Which token chose which expert. A slot is one of the choices of a token: slot t top_k + i is the i-th of token t.
struct Routes {
  const void* index;  // [slots], signed integers: the expert; skipped if it names none
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

// The blocks filled by sorted rows.
struct RowBlocks {
  const int* codes;                // a BlockCode for every block of rows; null if there are none
  const int* count;                // the number of blocks
  const RowRange* rows = nullptr;  // the rows of every expert, in blocks of kTiledBlock
};

// The expert of a block or tile, and the number of its filled rows: at most 255.
struct BlockCode {
  int code;

  static FUSED_MLP_HOST_DEVICE BlockCode of(int expert, int rows) { return {expert << 8 | rows}; }
  FUSED_MLP_HOST_DEVICE int expert() const { return code >> 8; }
  FUSED_MLP_HOST_DEVICE int rows() const { return code & 0xFF; }
};

constexpr int kFittedStep = 16;       // the height of a fitted tile is a multiple of this
constexpr int kMostFittedRows = 192;  // the maximum height of a fitted tile

// A tile of sorted rows that is only as high as necessary. All the tiles of an expert have nearly the same height.
struct alignas(16) FittedTile {
  BlockCode code;    // its expert, and the number of its filled rows
  int first, count;  // the expert's first tile, and the number of its tiles
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
  int experts;               // the number of outer products
  const float* row_weights;  // gradients are multiplied by these
  // Written by gradients: for every row, the partial sums of the gradient of its weight, one per kRowSumColumns
  // columns.
  float* row_sums;
};

constexpr int kRowSumColumns = 32;

// Rows of tokens that a GEMM reads from their original places, in the order of sorted rows.
struct RowGather {
  Matrix x;  // [tokens, k]
  int64_t k;
  const int* token_of_row;  // the token of every row of a block, filled or not
};

// A GEMM with one row of output per slot, by the weights of the slot's expert. In `gemm`, m is the number of slots;
// weights and biases are those of expert 0.
struct GroupedProblem {
  GemmProblem gemm;
  Routes routes;
  int slots_of_row;     // slots per row of a: top_k if its rows are tokens, 1 if they are slots
  int64_t weight_rows;  // distance from one expert's first row of weights to the next one's, for both operands
  // Weights are [k, n], or for a gated product [k, 2 n]: gates and ups concatenated, or interleaved by columns.
  // `gemm.weight` and `gemm.up_weight` are both the whole matrix.
  bool transposed, interleaved;
  // The same for the weights of gemm.low_rank, whose rows are slots, or sorted like those of a.
  int64_t low_rank_rows = 0;
  bool of_slots = false, low_rank_of_slots = false;  // one weight, or low-rank weight, per slot instead of per expert
  int64_t bias_stride;                               // from an expert's first bias to the next one's, for both operands
  int64_t bias_step;                                 // distance between columns
  GateLimits limits;
  RowBlocks blocks;
  FittedTiles fitted{};
  RowGather gather{};  // replaces gemm.a if there is a list
  bool outer = false;  // replaces all of this: every expert's a^T weight, [rows, m] and [rows, n], as [experts m, n]
  GroupedTraining training{};
};

enum class WeightType { kFloat32, kFloat64, kFloat16, kBFloat16 };

// Additional outputs for training, if row_weights is not null: zeros follow an expert's rows, up to a multiple of
// kZeroRows.
struct SortedTraining {
  const void* weights;  // [slots]
  WeightType type;
  float* row_weights;  // weights of the filled rows
};

constexpr int kZeroRows = 64;

// Copies rows of tokens to rows of slots, sorted by expert. Each expert's rows fill blocks of block_rows, the last one
// partly; the rest of that block keeps its contents, except in training. The lists of blocks, experts and tiles are
// written if they are not null.
struct RowSort {
  Routes routes;
  Matrix x;                         // [tokens, k], 16-bit elements
  int64_t k;                        // a multiple of 8
  int block_rows;                   // at most 128
  void* sorted;                     // [blocks * block_rows, k]; null if rows are gathered
  int* row_of_slot;                 // [slots], -1 if skipped
  int* codes;                       // [blocks], of RowBlocks
  int* count;                       // the number of blocks; codes and sorted have room for the maximum
  RowRange* rows = nullptr;         // the rows of every expert
  FittedTile* tiles = nullptr;      // if a block is a multiple of kFittedStep rows
  int* tile_count = nullptr;        // the same
  int* token_of_row = nullptr;      // for every row of a block, filled or not
  int* taken = nullptr;             // one per layer: set to 0
  int tile_rows = kMostFittedRows;  // maximum rows of a tile
  SortedTraining training{};
  int part;  // slots whose rows a CTA copies at a time; launch_row_sort() sets it
};

// out [tokens, n] = the rows of a token's slots, each times its weight, added in the order of the slots.
struct WeightedSum {
  Routes routes;
  const void* rows;  // [slots, n]; or, if they were sorted, the rows named by row_of_slot
  const int* row_of_slot;
  const void* weights;  // [slots], or null if all are 1
  WeightType type;
  void* out;
  int n;  // a multiple of 8
  DType dtype;
  Matrix residual = kNoMatrix;  // added if there is one: rows of tokens
};

// The gradients [slots] of the weights of a WeightedSum, from what the gradients' product has written.
struct WeightGradient {
  Routes routes;
  const float* row_sums;  // [rows, parts]
  int parts;
  const int* row_of_slot;
  void* out;
  WeightType type;
};

// The tiles of a grouped product, as far as the host can know them.
struct GroupedPlan {
  MainLoop loop;
  bool sorts;             // sorts rows, into blocks of a tile's height, or of kFittedStep with `fits`
  int rows;               // maximum rows of a tile
  int row_tiles;          // the maximum for any distribution of slots over experts
  int split_k;            // CTAs of a cluster that share a tile, each with a part of k
  int sorted_rows = 0;    // the maximum, if they are sorted
  bool fits = false;      // true if sorted rows are divided into fitted tiles
  bool few_rows = false;  // experts on the fitted loop have so few rows that reading the weights dominates
  bool gathers = false;   // true if the first layer reads tokens' rows from their original places: the sort lists them
};

constexpr int kTiledBlock = 128;    // rows of a tile in training
constexpr int kSearchedSlots = 32;  // the maximum if rows are not sorted: a lane for each, in every CTA
constexpr int kSortedBoxRows = 8;   // a swizzle's period: sorted rows come in boxes of this many

}  // namespace fused_mlp
