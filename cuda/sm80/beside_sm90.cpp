// The streamed kernels on a Hopper GPU, beside those of sm_90a. At few rows they are often the faster ones: they read
// 512 bytes of a weight row at a time, not 256, and have less to prepare (README.md).
#include <algorithm>
#include <limits>

#include "../gemm/choice/lines.h"
#include "grouped/grouped_plan.h"
#include "plan/plan.h"

namespace fused_mlp::sm80 {
namespace {

// Beyond so many rows the tensor cores of sm_90a are ahead.
constexpr int64_t kMostRows = 64, kMostGatedRows = 32;
constexpr int kLargestTile = 32;  // most kernels have no larger one
constexpr int kLeastTile = 8;
constexpr int kRowTiles = 2;
// Fitted to 2821 products of 1 to 32 rows on an H100 and an H200, each call with other weights, together with those of
// sm_90a's streamed kernels, with whose estimates these are compared (cuda/sm90/plan/tuning.h).
constexpr double kStart = 1.714;              // microseconds
constexpr double kRound = 0.311;              // microseconds
constexpr double kShareOfBandwidth = 0.9335;  // the part of the nominal bandwidth that is reached
constexpr double kRowBytesPerCycle = 192.5;   // that L2 sends each multiprocessor besides
constexpr double kAloneBytesPerCycle = 38.0;  // rows of both operands, by one CTA
constexpr double kBlockCycles = 359.0;        // cycles for a block of k
constexpr double kProductCycles = 0.0107;     // cycles for each product of two elements of a block's rows, by one warp
// Between two rounds of a product that is not gated, until a tile's results are stored: for each of them without an
// activation, and with one, which takes kActivationCycles besides, however few the results.
constexpr double kStoredCycles = 0.2, kActivatedCycles = 1.0, kActivationCycles = 600.0;
constexpr double kTileCycles = 1500.0;     // of one tile among several of a CTA, besides those of its blocks
constexpr int kWarpsAlone = 8;             // a CTA that is alone takes as long with four as with these
constexpr double kHidden = 3.0;            // microseconds that an early start hides behind a kernel of ours
constexpr double kMarginOfLargest = 1.09;  // for tiles of kLargestTile rows, whose estimates are the least certain
// Rows that are not whole lines are read in more pieces than the estimate knows of. Gated products of more rows than
// kMostGatedRowsOfBrokenLines took longer than those of sm_90a then.
constexpr double kBrokenLines = 1.25, kBrokenSectors = 1.5;
constexpr int64_t kMostGatedRowsOfBrokenLines = 16;

// One tile holds all rows, or two do: of them, the second finds the weights in L2. All rows should fill half of it.
bool holds(int64_t rows, int block_m) {
  const bool empty = block_m > kLeastTile && block_m >= 2 * rows;
  return !empty && rows <= kRowTiles * block_m;
}

// Kernels whose warps do not share k have short rings, and are for several CTAs on each multiprocessor; plain ones for
// several CTAs are for more tiles than there are multiprocessors.
bool enough(int64_t tiles, const ListedKernel& listed, const Gpu& gpu) {
  const Shape& shape = listed.shape;
  if (shape.warps_k == 1) return tiles >= int64_t{shape.ctas} * gpu.multiprocessors;
  return shape.ctas == 1 || is_gated(listed.kernel.product) || tiles > gpu.multiprocessors;
}

// CTAs are persistent: rounds of as many tiles as run side by side, and the last round of what is left. A round takes
// what its bytes take from memory, and rows of a from L2, or what one tile takes alone, if that is longer.
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

// For few choices the clusters of sm_90a's kernels have more to prepare and to add up than they save.
bool experts_are_faster_beside_sm90(const GroupedProblem& first, const Gpu&) {
  return first.routes.slots() <= kSearchedSlots && !first.transposed;
}

}  // namespace fused_mlp::sm80
