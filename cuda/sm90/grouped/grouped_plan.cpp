// The tiles of a grouped product.
#include <algorithm>
#include <iterator>

#include "../../gemm/choice/usual.h"
#include "../chip.h"
#include "grouped.h"
#include "grouped_rows.h"

namespace fused_mlp::sm90 {
namespace {

#define FUSED_MLP_ROWS(ROWS) ROWS,
constexpr int kRows[] = {FUSED_MLP_TRANSPOSED_ROWS(FUSED_MLP_ROWS)};
#undef FUSED_MLP_ROWS

// With more usual rows per expert the fitted loop is faster.
constexpr int64_t kMostStreamedRows = 16;

// Up to this many usual rows the fitted loop is bound by reading the weights. The first layer then gathers rows: it
// does not matter that such copies are slower than the TMA's.
constexpr int64_t kFewFittedRows = 96;

// CTAs that keep a multiprocessor busy. With more, a cluster's gain is lost by adding sums across CTAs.
constexpr int kBusyCtas = 2;

}  // namespace

GroupedPlan plan_tiles(const Routes& routes, int block_rows) {
  return {MainLoop::kTiled,
          true,
          kMostFittedRows,
          row_tiles(routes, kMostFittedRows),
          1,
          row_tiles(routes, block_rows) * block_rows,
          true};
}

GroupedPlan plan_grouped(const GroupedProblem& p, int multiprocessors) {
  const int64_t rows = usual_rows(p.routes);
  if (rows > kMostStreamedRows && !p.transposed) {
    GroupedPlan plan = plan_tiles(p.routes, kFittedStep);
    plan.few_rows = rows <= kFewFittedRows;
    plan.gathers = plan.few_rows && p.gemm.gated();
    return plan;
  }
  const int most = std::end(kRows)[-1];
  const int* found =
      std::find_if(std::begin(kRows), std::end(kRows), [&](int tile) { return tile >= std::min<int64_t>(rows, most); });
  const int tile = *found;
  const bool sorts = p.routes.slots() > kSearchedSlots;
  const int most_tiles = row_tiles(p.routes, tile);
  GroupedPlan plan{MainLoop::kStreamed, sorts, tile, most_tiles, 1, most_tiles * tile};

  // k is shared among as many CTAs as the tiles of all experts leave idle.
  const int64_t tiles = usual_experts(p.routes) * ceil_div(p.gemm.n, kStreamedColumns);
  const int64_t room = std::min<int64_t>(int64_t{kBusyCtas} * multiprocessors / tiles, ceil_div(p.gemm.k, kBlockK));
  while (plan.split_k * 2 <= std::min<int64_t>(room, kMaxStreamedSplitK)) plan.split_k *= 2;
  return plan;
}

}  // namespace fused_mlp::sm90
