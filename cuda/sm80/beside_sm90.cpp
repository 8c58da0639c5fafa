// The streamed kernels on a Hopper GPU, beside those of sm_90a. At few rows they are often the faster ones: they read
// 512 bytes of a weight row at a time, not 128, and have less to prepare (docs/kernels.md).
#include <algorithm>
#include <limits>

#include "plan.h"

namespace fused_mlp::sm80 {
namespace {

// Beyond so many rows the tensor cores of sm_90a are ahead.
constexpr int64_t kMostRows = 32;
// Weight rows that do not begin at a line of 128 bytes are read in more pieces than the estimate knows of.
constexpr int64_t kLineElements = 64;

// Measured on an H200, each call with other weights, at 132 products of 1 to 32 rows. The estimates are in units of
// those of sm_90a (cuda/sm90/tuning.h), which they are compared with: what counts is the ratio of both times.
constexpr double kStart = 2.0;              // microseconds
constexpr double kShareOfBandwidth = 0.90;  // of the nominal one
constexpr double kL2BytesPerCycle = 125.0;  // of rows of a, which reach one multiprocessor
constexpr double kBlockCycles = 335.0;      // of a block of k
constexpr double kProductCycles = 0.0066;   // of a block, for each product of two elements of its rows and a warp

int smallest_tile(int64_t rows) { return rows <= 8 ? 8 : rows <= 16 ? 16 : 32; }

// CTAs are persistent: rounds of as many tiles as run side by side, and the last round of what is left. A round takes
// what its bytes take from memory, and rows of a from L2, or what one tile takes alone, if that is longer.
double microseconds(const GemmProblem& p, const ListedKernel& listed, const Gpu& gpu) {
  const Shape& shape = listed.shape;
  const int64_t tiles = ceil_div(p.n, listed.kernel.columns());
  const int64_t side_by_side = gpu.multiprocessors * streamed_ctas(shape, gpu.shared_of_multiprocessor);
  const double bytes_of_row = 2.0 * p.k;
  const double from_memory = shape.rows_m * bytes_of_row / (kShareOfBandwidth * gpu.bytes_per_microsecond);
  const double from_l2 =
      shape.rows_n * bytes_of_row / (kL2BytesPerCycle * gpu.cycles_per_microsecond * gpu.multiprocessors);
  const double work =
      static_cast<double>(shape.rows_m) * shape.rows_n * shape.block_k / (shape.warps_m * shape.warps_k);
  const double alone =
      ceil_div(p.k, shape.block_k) * (kBlockCycles + kProductCycles * work) / gpu.cycles_per_microsecond;
  const auto round = [&](int64_t count) { return std::max(count * (from_memory + from_l2), alone); };
  const int64_t left = tiles % side_by_side;
  return kStart + (tiles / side_by_side) * round(side_by_side) + (left > 0 ? round(left) : 0.0);
}

}  // namespace

GemmPlan choose_beside_sm90(const GemmProblem& p, const Gpu& gpu) {
  GemmPlan best{{}, std::numeric_limits<double>::infinity()};
  const bool lines =
      p.weight.row_stride % kLineElements == 0 && (!p.gated() || p.up_weight.row_stride % kLineElements == 0);
  if (p.m > kMostRows || is_training(p.product()) || !lines) return best;
  for (size_t place = 0; place < std::size(kListed); ++place) {
    const ListedKernel& listed = kListed[place];
    const bool suits = listed.kernel.loop == MainLoop::kStreamed && listed.kernel.product == p.product() &&
                       listed.kernel.block_m == smallest_tile(p.m) && offered(place, gpu);
    if (!suits) continue;
    const double estimated = microseconds(p, listed, gpu);
    if (estimated < best.microseconds) best = {listed.kernel, estimated};
  }
  return best;
}

}  // namespace fused_mlp::sm80
