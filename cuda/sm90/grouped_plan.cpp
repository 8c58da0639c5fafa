// How a grouped product is cut into tiles.
#include <algorithm>
#include <cmath>
#include <iterator>

#include "../gemm/experts.h"
#include "chip.h"
#include "grouped_rows.h"

namespace fused_mlp::sm90 {
namespace {

#define FUSED_MLP_ROWS(ROWS) ROWS,
constexpr int kRows[] = {FUSED_MLP_TRANSPOSED_ROWS(FUSED_MLP_ROWS)};
#undef FUSED_MLP_ROWS

// With more usual rows of an expert the fitted loop is the faster one.
constexpr int64_t kMostStreamedRows = 16;

// Up to this many usual rows reading the weights takes the time on the fitted loop. The first layer gathers rows then:
// it does not matter that such copies are slower than the TMA's.
constexpr int64_t kFewFittedRows = 96;

// CTAs that keep a multiprocessor busy. What a cluster gains beyond them, its sums across CTAs cost.
constexpr int kBusyCtas = 2;

// The rows that few experts exceed, were they chosen by chance. A token hardly chooses an expert twice.
int64_t usual_rows(const Routes& routes) {
  const double mean = static_cast<double>(routes.slots()) / routes.experts;
  return std::clamp<int64_t>(std::ceil(mean + 2.0 * std::sqrt(mean)), 1, routes.tokens);
}

// The experts that are chosen at all, likewise.
int64_t usual_experts(const Routes& routes) {
  const double missed = std::pow(1.0 - 1.0 / routes.experts, routes.slots());
  return std::clamp<int64_t>(std::ceil(routes.experts * (1.0 - missed)), 1, std::max(routes.slots(), 1));
}

// The most tiles of rows that there can be.
int row_tiles(const Routes& routes, int tile) {
  const int64_t lacking =
      std::min<int64_t>(routes.experts, routes.slots()) * (tile - 1);  // rows of partly filled tiles
  return static_cast<int>((routes.slots() + lacking) / tile);
}

}  // namespace

GroupedPlan plan_tiles(const Routes& routes, int block_rows) {
  return {MainLoop::kTiled,
          true,
          kMostFittedRows,
          row_tiles(routes, kMostFittedRows),
          1,
          row_tiles(routes, block_rows) * block_rows};
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

  // As many CTAs share k as the tiles of all experts leave idle.
  const int64_t tiles = usual_experts(p.routes) * ceil_div(p.gemm.n, kStreamedColumns);
  const int64_t room = std::min<int64_t>(int64_t{kBusyCtas} * multiprocessors / tiles, ceil_div(p.gemm.k, kBlockK));
  while (plan.split_k * 2 <= std::min<int64_t>(room, kMaxStreamedSplitK)) plan.split_k *= 2;
  return plan;
}

}  // namespace fused_mlp::sm90
