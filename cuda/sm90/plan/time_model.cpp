#include "time_model.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "../../gemm/choice/lines.h"
#include "../chip.h"

namespace fused_mlp::sm90 {
namespace {

double bytes(const GemmProblem& p) {
  const double a = static_cast<double>(p.m) * p.k, weight = static_cast<double>(p.n) * p.k;
  const int terms = p.pair() ? p.terms() : 1, weights = p.gated() ? 2 : terms;
  return 2.0 * (a * terms + weight * weights + static_cast<double>(p.m) * p.n * moved_matrices(p.product()));
}

// The longer of the two times, plus a tenth of the shorter. Without that tenth all memory-bound kernels would have the
// same estimate, and their order would decide the choice.
double bounded(double time, double floor) {
  constexpr double kShorter = 0.1;
  return std::max(time, floor) + kShorter * std::min(time, std::max(floor, 0.0));
}

// The factor by which all bytes take longer because the last CTAs, fewer than fit at once, cannot read at the full
// rate: their bytes take at least a fraction of the time of a full round. With few rows less work hides this.
double last_round(const GemmProblem& p, double ctas, double room) {
  const double least = p.m < kTiledRows ? 0.6 : 0.48;
  const double left = std::fmod(ctas, room) / room;
  return ctas > room && left > 0.0 ? 1.0 + std::max(0.0, least - left) * room / ctas : 1.0;
}

// The time that the L2 cache takes to send every streamed CTA its part of the weights and the rows of a.
double microseconds_from_l2(const GemmProblem& p, const GemmKernel& kernel, const Chip& chip) {
  constexpr double kBytesPerMicrosecond = 38.0 * 1980;  // per multiprocessor, if chip.clock is 1
  const double tiles_m = ceil_div(p.m, kernel.block_m), tiles_n = ceil_div(p.n, kernel.columns());
  const double rows = tiles_m * tiles_n * (std::ceil(p.m / tiles_m) + kernel.block_n);
  return 2.0 * rows * p.k / (kBytesPerMicrosecond * chip.multiprocessors * chip.clock);
}

}  // namespace

double estimated_microseconds(const GemmProblem& p, const GemmKernel& kernel, const TiledTime& c, const Chip& chip) {
  const int resident = std::max(1, usable_multiprocessors(chip.multiprocessors, kernel.split_k) / kernel.split_k);
  const int64_t tiles = ceil_div(p.m, kernel.block_m) * ceil_div(p.n, kernel.columns());
  const int64_t rounds = ceil_div(tiles, resident);
  const int64_t k_blocks = ceil_div(ceil_div(p.k, kBlockK) * (p.pair() ? p.terms() : 1), kernel.split_k);
  double loop = c.k_block * k_blocks;
  if (kernel.split_k > 1) {
    // Many small tiles request more from the L2 cache than it can send, which is this much per multiprocessor.
    constexpr double kBytesPerMicrosecond = 34.5 * 1980;  // if chip.clock is 1
    const double ctas = static_cast<double>(std::min<int64_t>(tiles, resident) * kernel.split_k);
    const double asked = ctas * k_blocks * kBlockK * 2.0 * (kernel.block_m + kernel.block_n);
    loop = std::max(loop, asked / (kBytesPerMicrosecond * chip.multiprocessors));
  }
  double round = c.round + loop;
  if (!p.gated() && !p.linear()) round += c.activation;
  round /= chip.clock;
  // The CTAs of a cluster add up their sums after all bytes have arrived: no read hides that.
  const double added = kernel.split_k > 1 ? c.round / chip.clock : 0.0;
  round -= added;
  const bool few_rows = p.m < kTallRows;
  // With few rows of a gated product tiled kernels reach less of the bandwidth than streamed ones.
  constexpr double kFewRows = 1.04;
  const double floor = (few_rows && p.gated() ? kFewRows : 1.0) * bytes(p) / chip.bytes_per_microsecond;
  // Swapped tiles of few rows are spread evenly over several rounds, and so are their bytes. Up to 64 rows this is
  // ignored: streamed kernels were faster where it would have decided.
  const bool swapped = kernel.schedule == Schedule::kSwapped || kernel.schedule == Schedule::kSwappedHalfRows;
  const bool spread = swapped && kernel.split_k == 1 && ceil_div(p.m, kernel.block_m) * kernel.block_m <= kEvenRows;
  const bool even = spread && rounds > 1 && !few_rows;
  const double floor_of_full = even ? floor / rounds : floor * resident / tiles;
  const double time = rounds * added + (rounds - 1) * bounded(round, floor_of_full) +
                      bounded(c.start / chip.clock + round, floor - (rounds - 1) * floor_of_full);
  // Few tiles, several rounds of small ones, and weights of a plain product that come only from memory are bound by the
  // maximum rate into a multiprocessor: it is lower with few rows and two weights, and with slower memory (measured on
  // an H100 and an H200).
  const bool passes = !p.gated() && 2 * p.n * p.k > kPassingBytes;
  if (is_training(p.product()) || !(few_rows || rounds > 1 || passes)) return time;
  constexpr double kReceived = 56.0 * 1980, kLessReceived = 48.0 * 1980;  // bytes, if chip.clock is 1
  constexpr double kSharesOfMemory = 4.2;  // maximum: another multiprocessor has read most of the data into L2
  const double from_memory = kSharesOfMemory * chip.bytes_per_microsecond / chip.multiprocessors;
  const double from_l2 = (few_rows || p.gated() ? kLessReceived : kReceived) * chip.clock;
  const double received_per_microsecond = passes ? std::min(from_l2, from_memory) : from_l2;
  const double rows = std::min<double>(p.m, kernel.block_m) + kernel.block_n;
  const double received = 2.0 * rounds * rows * p.k / kernel.split_k;
  return std::max(time, received / received_per_microsecond);
}

double estimated_microseconds(const GemmProblem& p, const GemmKernel& kernel, const StreamedTime& c, const Chip& chip) {
  const int rows = kernel.block_m, split_k = kernel.split_k;
  const double ctas = static_cast<double>(ceil_div(p.m, rows) * ceil_div(p.n, kernel.columns()) * split_k);
  const int usable = usable_multiprocessors(chip.multiprocessors, split_k);
  const double most = std::ceil(ctas / usable);
  const double block = c.k_block + c.k_row * rows + (c.shared_k_column * kernel.block_n + c.shared_k_row * rows) * most;
  const double split = c.split_2 * (split_k >= 2) + c.split_4 * (split_k >= 4) + c.split_8 * (split_k >= 8);
  const double time = split + ceil_div(ceil_div(p.k, kBlockK), split_k) * block;
  const double idle = most * usable / ctas - 1.0;
  // Streamed kernels take this fraction of the time that tiled ones take for the same bytes.
  constexpr double kTogether = 0.955, kAlone = 1.04;
  const double share = blocks_together(p) > 1 ? kTogether : p.m < kTallRows ? kAlone : 1.0;
  const double from_memory = share * bytes(p) / chip.bytes_per_microsecond * (1.0 + c.tail * idle);
  const double floor = from_memory * last_round(p, ctas, usable * streamed_ctas(kernel.columns()));
  const double wide = kernel.columns() > kStreamedColumns ? c.wide : 0.0;
  const double cta = c.cta + c.result * rows * kernel.block_n;
  const double estimated = (c.start + wide + cta * most) / chip.clock +
                           bounded(time / chip.clock, std::max(floor, microseconds_from_l2(p, kernel, chip)));
  // Tiled kernels and gated products lose less if rows are not whole lines (measured on an H100 and an H200).
  constexpr double kBrokenLines = 1.2;
  return p.gated() || rows_fill(p, kLineBytes) ? estimated : kBrokenLines * estimated;
}

// As measured in MLPs on an H100.
double hidden_microseconds(const GemmProblem& p, const GemmKernel& kernel, const Chip& chip) {
  if (!starts_early(p, kernel, chip.multiprocessors)) return 0.0;
  if (kernel.loop == MainLoop::kStreamed) return hidden_behind(p, p.m < kTallRows ? 3.0 : 1.5);
  return hidden_behind(p, fits_beside_before(p, kernel, chip.multiprocessors) ? 1.5 : 0.5);
}

double torch_microseconds(const GemmProblem& p, const TorchTime& c, const Chip& chip) {
  constexpr int kTiles[] = {64, 128}, kMostParts = 8;
  double arithmetic = std::numeric_limits<double>::infinity();
  for (const int tile : kTiles) {
    const double tile_microseconds = (tile == kTiles[0] ? c.small_block : c.large_block) * p.k / kBlockK;
    const int64_t tiles = ceil_div(p.m, tile) * ceil_div(p.n, tile);
    for (int parts = 1; parts <= kMostParts; parts *= 2) {
      const double rounds = static_cast<double>(ceil_div(tiles * parts, chip.multiprocessors));
      arithmetic = std::min(arithmetic, rounds * tile_microseconds / parts + (parts > 1 ? c.split : 0.0));
    }
  }
  const double results = 2.0 * p.m * p.n;  // bytes, like those of the operands
  const double operands = 2.0 * (static_cast<double>(p.m) * p.k + static_cast<double>(p.n) * p.k);
  const double floor = (operands + results) / (c.share_of_bandwidth * chip.bytes_per_microsecond);
  const double gemm = c.start + std::max(arithmetic / chip.clock, floor);
  if (p.linear() && !p.gated()) return gemm;
  const int gemms = p.gated() ? 2 : 1;
  // L2 still holds a part of the pointwise kernel's data (measured on an H100 and an H200).
  constexpr double kHeld = 30e6, kBytesPerMicrosecond = 5.3e6;
  const double moved = (gemms + 1) * results, held = std::min(moved, kHeld);
  const double beyond = (moved - held) / (c.pointwise_share * chip.bytes_per_microsecond);
  return gemms * gemm + c.pointwise_start + held / (kBytesPerMicrosecond * chip.clock) + beyond;
}

}  // namespace fused_mlp::sm90
