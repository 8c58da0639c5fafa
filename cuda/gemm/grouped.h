// Products whose rows are grouped by weights: the two layers of the experts of a mixture, and the sum behind them.
// Plain C++, as problem.h.
#pragma once

#include "problem.h"

namespace fused_mlp {

// Who chose which expert. A slot is one of the choices of a token: slot t top_k + i is the i-th of token t.
struct Routes {
  const void* index;  // [slots], signed integers: an expert each. What names none is skipped
  int index_bytes;    // of such an integer
  int tokens;
  int top_k;
  int experts;

  FUSED_MLP_HOST_DEVICE int slots() const { return tokens * top_k; }
};

// A GEMM with a row of the output for every slot, by the weights of the slot's expert. In `gemm`, m is the number of
// slots; weights and biases are those of expert 0.
struct GroupedProblem {
  GemmProblem gemm;
  Routes routes;
  int slots_of_row;     // of a: top_k where its rows are those of tokens, 1 where they are those of slots
  int64_t weight_rows;  // from an expert's first row of weights to the next one's, for both operands
  int64_t bias_stride;  // from an expert's first bias to the next one's, for both operands
  int64_t bias_step;    // from column to column
  GateLimits limits;
  // Where rows were sorted: the experts of the blocks of rows, and how many blocks there are. Null otherwise.
  const int* block_experts;
  const int* blocks;
};

// Rows of tokens to rows of slots, sorted by expert. Each expert's rows fill blocks of kGroupedBlock, the last of them
// in part: what stands in its other rows is left.
struct RowSort {
  Routes routes;
  Matrix x;            // [tokens, k], 16-bit elements
  int64_t k;           // a multiple of 8
  void* sorted;        // [blocks * kGroupedBlock, k]
  int* row_of_slot;    // [slots], -1 where skipped
  int* block_experts;  // [blocks]: twice the expert, plus one where at most half the block's rows are filled
  int* blocks;         // how many there are: block_experts and sorted have room for as many as there can be
};

enum class WeightType { kFloat32, kFloat64, kFloat16, kBFloat16 };

// out [tokens, n] = the rows of a token's slots, each times its weight, added in the order of the slots.
struct WeightedSum {
  Routes routes;
  const void* rows;  // [slots, n]; or where they were sorted, those that row_of_slot says
  const int* row_of_slot;
  const void* weights;  // [slots]
  WeightType type;
  void* out;
  int n;  // a multiple of 8
  DType dtype;
};

// How a grouped product is cut into tiles, from what the host knows.
struct GroupedPlan {
  MainLoop loop;  // tiled where rows are to be sorted
  int rows;       // of a tile, at most
  int row_tiles;  // at most, however the slots fall on the experts
  int split_k;    // CTAs of a cluster that share a tile, each with a part of k
};

constexpr int kGroupedBlock = 128;  // rows
constexpr int kMaxGroupedExperts = 512;
constexpr int kMaxStreamedSlots = 4096;  // every CTA of a streamed kernel reads the whole index

}  // namespace fused_mlp
