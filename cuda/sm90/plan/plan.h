// Which kernels of sm_90a can compute a problem, and which of them is estimated to be the fastest.
#pragma once

#include <iterator>

#include "../../gemm/problem.h"
#include "../chip.h"
#include "time_model.h"

namespace fused_mlp::sm90 {

// The kernels of kernels.def. Streamed ones are listed with their most columns and split_k 1: these are arguments of
// the launch.
inline constexpr GemmKernel kKernels[] = {
#define FUSED_MLP_STREAMED(PRODUCT, BLOCK_M, COLUMNS)                  \
  {MainLoop::kStreamed,                                                \
   Product::k##PRODUCT,                                                \
   BLOCK_M,                                                            \
   Product::k##PRODUCT == Product::kGated ? 2 * (COLUMNS) : (COLUMNS), \
   Schedule::kSwapped,                                                 \
   1},
#define FUSED_MLP_TILED(PRODUCT, BLOCK_M, BLOCK_N, SCHEDULE, SPLIT_K) \
  {MainLoop::kTiled, Product::k##PRODUCT, BLOCK_M, BLOCK_N, Schedule::k##SCHEDULE, SPLIT_K},
#define FUSED_MLP_TRAINING FUSED_MLP_TILED
#include "kernels.def"
};

// From kTallRows on, a streamed kernel is considered for a product without an activation, where one tile holds all
// rows, with few parts of k, and has constants of its own.
constexpr int kTallSplitK = 2;

// Calls visit(kernel) for every number of columns and split of k of a streamed kernel that may be the best for n
// columns: those that share the columns out evenly over 1, 2, ... CTAs to a multiprocessor, and the most that the
// kernel has.
template <typename Visitor>
void for_each_cut(const GemmProblem& p, GemmKernel kernel, int multiprocessors, Visitor&& visit) {
  const int parts = p.gated() ? 2 : 1, most = kernel.columns() - rows_of_factor(p);
  const int64_t tiles_m = ceil_div(p.m, kernel.block_m);
  const int most_split_k = p.m < kTallRows ? kMaxStreamedSplitK : kTallSplitK;
  for (; kernel.split_k <= most_split_k && blocks_together(p) * kBlockK * (kernel.split_k - 1) < p.k;
       kernel.split_k *= 2) {
    int before = 0;
    const auto visit_columns = [&](int columns) {
      kernel.block_n = parts * columns;
      if (columns != before) visit(kernel);
      before = columns;
    };
    visit_columns(most);
    const int usable = usable_multiprocessors(multiprocessors, kernel.split_k);
    for (int ctas = 1; ctas <= streamed_ctas(most); ++ctas) {
      const int64_t tiles = usable * ctas / kernel.split_k / tiles_m;  // tiles of columns that there is room for
      if (tiles == 0) continue;
      const int64_t columns = ceil_div(p.n, tiles * kStoredColumns) * kStoredColumns;
      if (most - kStreamedColumns < columns && columns <= most) visit_columns(static_cast<int>(columns));
    }
  }
}

// Calls visit(index in kKernels, kernel) for every kernel, split of k and number of columns that suits the problem's
// size.
template <typename Visitor>
void for_each_candidate(const GemmProblem& p, int multiprocessors, Visitor&& visit) {
  // Every tile of rows reads all the weights. Few rows of a gated product read those that L2 does not keep once. Plain
  // products of kTiledRows rows and more read all of them once: two tiles took as long alone, and longer behind a GEMM.
  const bool once = p.m < kTiledRows ? p.gated() && 4 * p.n * p.k > kPassingBytes : p.linear();
  const int64_t most_tiles = once ? 1 : 4;
  int fitting = 0;  // the rows of the smallest tile that all rows fit in: a larger is only emptier
  for (size_t i = 0; i < std::size(kKernels); ++i) {
    const GemmKernel kernel = kKernels[i];
    if (kernel.product != p.product()) continue;
    if (kernel.loop == MainLoop::kTiled) {
      const bool every_cta_has_k = kernel.split_k == 1 || p.k >= kBlockK * kernel.split_k;
      const bool half_full = p.m >= kTiledRows && 2 * p.m > kernel.block_m;
      const bool rows_suit = half_full || is_training(kernel.product);  // which has no streamed kernels
      if (rows_suit && every_cta_has_k) visit(i, kernel);
      continue;
    }
    const int64_t tiles = ceil_div(p.m, kernel.block_m);
    if (p.m < kTallRows ? tiles > most_tiles : tiles > 1 || !p.linear()) continue;
    if (fitting > 0 && kernel.block_m > fitting) continue;
    if (tiles == 1 && fitting == 0) fitting = kernel.block_m;
    for_each_cut(p, kernel, multiprocessors, [&](const GemmKernel& cut) { visit(i, cut); });
  }
}

// The candidate of the least estimated time, by the constants of tuning.h.
GemmPlan choose(const GemmProblem& problem, const Chip& chip);

}  // namespace fused_mlp::sm90
