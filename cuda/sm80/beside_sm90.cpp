// The streamed kernels on a Hopper GPU, in addition to those of sm_90a. With few rows they are often faster: they read
// 512 bytes of a weight row at a time, not 256, and have less to prepare (README.md).
#include <algorithm>
#include <limits>

#include "../gemm/choice/lines.h"
#include "grouped/grouped_plan.h"
#include "plan/plan.h"

namespace fused_mlp::sm80 {
namespace {

// With more rows the tensor cores of sm_90a are faster.
constexpr int64_t kMostRows = 64, kMostGatedRows = 32;
constexpr int kLargestTile = 32;  // most kernels have no larger one
constexpr int kLeastTile = 8;
constexpr int kRowTiles = 2;
// Fitted to 2821 products of 1 to 32 rows on an H100 and an H200, with new weights on each call, together with those of
// sm_90a's streamed kernels, with whose estimates these are compared (cuda/sm90/plan/tuning.h).
constexpr double kStart = 1.714;              // microseconds
constexpr double kRound = 0.311;              // microseconds
constexpr double kShareOfBandwidth = 0.9335;  // the fraction of the nominal bandwidth that is reached
constexpr double kRowBytesPerCycle = 192.5;   // additional rate from L2 to each multiprocessor
constexpr double kAloneBytesPerCycle = 38.0;  // rows of both operands, by a single CTA
constexpr double kBlockCycles = 359.0;        // cycles for a block of k
constexpr double kProductCycles = 0.0107;     // cycles for each product of two elements of a block's rows, by one warp
// Cycles between two rounds of a product without a gate, until a tile's results are stored: per result without and with
// an activation. An activation also takes kActivationCycles, however few the results are.
constexpr double kStoredCycles = 0.2, kActivatedCycles = 1.0, kActivationCycles = 600.0;
constexpr double kTileCycles = 1500.0;     // per tile of a CTA that has several, in addition to those of its blocks
constexpr int kWarpsAlone = 8;             // a single CTA takes as long with four as with these
constexpr double kHidden = 3.0;            // microseconds that an early start hides after a kernel of ours
constexpr double kMarginOfLargest = 1.09;  // for tiles of kLargestTile rows, whose estimates are least certain
// Rows that are not whole lines are read in more pieces than the estimate assumes. Gated products of more rows than
// kMostGatedRowsOfBrokenLines then took longer than those of sm_90a.
constexpr double kBrokenLines = 1.25, kBrokenSectors = 1.5;
constexpr int64_t kMostGatedRowsOfBrokenLines = 16;

// All rows fit into one tile, or into two, of which the second finds the weights in L2. They should fill at least half
// of it.
bool holds(int64_t rows, int block_m) {
  const bool empty = block_m > kLeastTile && block_m >= 2 * rows;
  return !empty && rows <= kRowTiles * block_m;
}

// Kernels whose warps do not share k have short rings, and are meant for several CTAs per multiprocessor. Plain kernels
// for several CTAs are meant for more tiles than there are multiprocessors.
bool enough(int64_t tiles, const ListedKernel& listed, const Gpu& gpu) {
  const Shape& shape = listed.shape;
  if (shape.warps_k == 1) return tiles >= int64_t{shape.ctas} * gpu.multiprocessors;
  return shape.ctas == 1 || is_gated(listed.kernel.product) || tiles > gpu.multiprocessors;
}

// CTAs are persistent: there are rounds of as many tiles as run in parallel, and a last round of the remaining ones. A
// round takes the time to load its bytes from memory, and rows of a from L2, or the time of a single tile, if that is
// longer.
double microseconds(const GemmProblem& p, const ListedKernel& listed, int64_t tiles, const Gpu& gpu) {
  const Shape& shape = listed.shape;
  const int64_t side_by_side = gpu.multiprocessors * streamed_ctas(shape, gpu.shared_of_multiprocessor);
  const double bytes_of_row = 2.0 * p.k;
  const double read = static_cast<double>(shape.rows_m) / ceil_div(p.m, shape.rows_n);  // from memory; the rest from L2
  const double from_memory = read * bytes_of_row / (kShareOfBandwidth * gpu.bytes_per_microsecond);
  const double cycles_for_rows =
      (shape.rows_n + shape.rows_m - read) * bytes_of_row / (kRowBytesPerCycle * gpu.multiprocessors);
  const double together = from_memory + cycles_for_rows / gpu.cycles_per_microsecond;
  const double products = static_cast<double>(shape.rows_m) * shape.rows_n * shape.block_k;
  const int warps = shape.ctas == 1 ? kWarpsAlone : shape.warps_m * shape.warps_k;
  const double block_cycles = kBlockCycles + kProductCycles * products / warps;
  const double cycles_alone = std::max(ceil_div(p.k, shape.block_k) * block_cycles,
                                       (shape.rows_m + shape.rows_n) * bytes_of_row / kAloneBytesPerCycle) +
                              (tiles > side_by_side ? kTileCycles : 0.0);
  const auto round = [&](int64_t count) {
    return count == 0 ? 0.0 : kRound + std::max(count * together, cycles_alone / gpu.cycles_per_microsecond);
  };
  const double rounds = kStart + tiles / side_by_side * round(side_by_side) + round(tiles % side_by_side);
  if (p.gated()) return rounds;
  const double results = static_cast<double>(shape.rows_n) * shape.rows_m;
  const double stored_cycles = p.linear() ? kStoredCycles * results : kActivatedCycles * results + kActivationCycles;
  return rounds + (ceil_div(tiles, side_by_side) - 1) * stored_cycles / gpu.cycles_per_microsecond;
}

}  // namespace

GemmPlan choose_beside_sm90(const GemmProblem& p, const Gpu& gpu) {
  GemmPlan best{{}, std::numeric_limits<double>::infinity()};
  const bool lines = rows_fill(p, kLineBytes);
  const int64_t most_gated = lines ? kMostGatedRows : kMostGatedRowsOfBrokenLines;
  if (p.m > (p.gated() ? most_gated : kMostRows) || is_training(p.product()) || p.low_rank) return best;
  const double broken = lines ? 1.0 : p.gated() || rows_fill(p, kSectorBytes) ? kBrokenLines : kBrokenSectors;
  for (size_t place = 0; place < std::size(kListed); ++place) {
    const ListedKernel& listed = kListed[place];
    const bool suits = listed.kernel.loop == MainLoop::kStreamed && listed.kernel.product == p.product() &&
                       holds(p.m, listed.kernel.block_m) && offered(place, gpu);
    const int64_t tiles = ceil_div(p.m, listed.kernel.block_m) * ceil_div(p.n, listed.kernel.columns());
    if (!suits || !enough(tiles, listed, gpu)) continue;
    const double margin = listed.kernel.block_m == kLargestTile ? kMarginOfLargest : 1.0;
    const double estimated = broken * margin * microseconds(p, listed, tiles, gpu);
    const int64_t side_by_side = gpu.multiprocessors * streamed_ctas(listed.shape, gpu.shared_of_multiprocessor);
    const bool early = starts_early(p, listed.shape, std::min(tiles, side_by_side), gpu);
    const GemmPlan plan{listed.kernel, estimated, nullptr, early ? hidden_behind(p, kHidden) : 0.0};
    if (plan.longest() < best.longest()) best = plan;
  }
  return best;
}

// With few choices the clusters of sm_90a's kernels lose more by preparing and adding up than they gain.
bool experts_are_faster_beside_sm90(const GroupedProblem& first, const Gpu&) {
  return first.routes.slots() <= kSearchedSlots && !first.transposed;
}

}  // namespace fused_mlp::sm80
