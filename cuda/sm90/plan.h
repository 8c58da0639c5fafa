// Which kernels of sm_90a can compute a problem, and which of them is estimated to be the fastest.
#pragma once

#include <iterator>

#include "../gemm/problem.h"
#include "chip.h"
#include "time_model.h"

namespace fused_mlp::sm90 {

// The kernels of kernels.def. Streamed ones are listed once, with split_k 1: theirs is an argument of the launch.
inline constexpr GemmKernel kKernels[] = {
#define FUSED_MLP_STREAMED(PRODUCT, BLOCK_M)                                         \
  {MainLoop::kStreamed,                                                              \
   Product::k##PRODUCT,                                                              \
   BLOCK_M,                                                                          \
   Product::k##PRODUCT == Product::kGated ? 2 * kStreamedColumns : kStreamedColumns, \
   Schedule::kSwapped,                                                               \
   1},
#define FUSED_MLP_TILED(PRODUCT, BLOCK_M, BLOCK_N, SCHEDULE, SPLIT_K) \
  {MainLoop::kTiled, Product::k##PRODUCT, BLOCK_M, BLOCK_N, Schedule::k##SCHEDULE, SPLIT_K},
#define FUSED_MLP_TRAINING FUSED_MLP_TILED
#include "kernels.def"
};

// Calls visit(index in kKernels, kernel) for every kernel and split of k that suits the problem's size.
template <typename Visitor>
void for_each_candidate(const GemmProblem& p, Visitor&& visit) {
  constexpr int64_t kStreamedRows = 256;  // streamed kernels are considered up to here,
  constexpr int64_t kStreamedTiles = 4;   // with at most this many tiles of rows: each tile reads all the weights
  bool rows_fit = false;                  // in one tile of a streamed kernel: a larger one would only be emptier
  for (size_t i = 0; i < std::size(kKernels); ++i) {
    GemmKernel kernel = kKernels[i];
    if (kernel.product != p.product()) continue;
    if (kernel.loop == MainLoop::kTiled) {
      const bool every_cta_has_k = kernel.split_k == 1 || p.k >= kBlockK * kernel.split_k;
      const bool rows_suit = p.m >= kTiledRows || is_training(kernel.product);  // which has no streamed kernels
      if (rows_suit && every_cta_has_k) visit(i, kernel);
      continue;
    }
    const int64_t tiles = ceil_div(p.m, kernel.block_m);
    if (p.m > kStreamedRows || tiles > kStreamedTiles || rows_fit) continue;
    rows_fit = tiles == 1;
    for (; kernel.split_k <= kMaxStreamedSplitK && kBlockK * (kernel.split_k - 1) < p.k; kernel.split_k *= 2) {
      visit(i, kernel);
    }
  }
}

// The candidate of the least estimated time, by the constants of tuning.h.
GemmPlan choose(const GemmProblem& problem, const Chip& chip);

}  // namespace fused_mlp::sm90
