// Facts of the chip and of the main loops, for the launches and for the model of their times.
#pragma once

#include <cstdint>

#include "../gemm/problem.h"

namespace fused_mlp::sm90 {

constexpr int kBlockK = 64;            // elements of k that a stage of shared memory holds
constexpr int kStreamedColumns = 64;   // columns of the output that a wgmma of a streamed kernel computes at most
constexpr int kStoredColumns = 4;      // that a thread of a streamed kernel stores together: a tile has a multiple
constexpr int kMaxStreamedSplitK = 8;  // CTAs that share a streamed tile's k: 1, 2, 4 or 8

// Tiled kernels are chosen from this many rows on, and where these fill more than half of a tile.
constexpr int64_t kTiledRows = 33;

// From this many rows on, a streamed kernel reads more of a than of the weights.
constexpr int64_t kTallRows = 65;

// The number of blocks of k that a kernel which waits for the weights asks for one right after the other, once there is
// room for all of them. Memory gives 256 bytes that begin at a multiple of 256 in less time than 128 now and 128 later,
// so this is for weights whose rows lie multiples of that apart.
constexpr int kMostBlocksTogether = 2;
inline bool rows_are_whole_pieces(const GemmProblem& p) {
  constexpr int64_t kElements = kMostBlocksTogether * kBlockK;
  return p.weight.row_stride % kElements == 0 && p.up_weight.row_stride % kElements == 0;
}

// The number that a streamed kernel of a dense product asks for so. With many rows of a, a ring has room for few
// blocks, and pairs do not pay: with four blocks they took up to 1.2 of the time, and with nine as long (measured on an
// H100).
inline int blocks_together(const GemmProblem& p) {
  return p.m < kTallRows && rows_are_whole_pieces(p) ? kMostBlocksTogether : 1;
}

// The number of CTAs of a streamed kernel that a multiprocessor holds at once, by the most columns of its tiles.
constexpr int streamed_ctas(int columns) { return columns > kStreamedColumns ? 2 : 3; }

// If a CTA of a streamed kernel for fewer than kTiledRows rows reads no more of the weights than this, a deep ring
// gains nothing, and half of a multiprocessor's shared memory leaves room for CTAs of the kernel behind it, which start
// early.
constexpr int64_t kSmallStreamedCta = 256 << 10;

// Weights of more bytes than this pass through the L2 cache: it keeps none of them until they are read again.
constexpr int64_t kPassingBytes = 50 << 20;

// True if all CTAs find room on multiprocessors that the kernel before leaves idle.
inline bool fits_beside_before(const GemmProblem& p, const GemmKernel& kernel, int multiprocessors) {
  return ctas_of(p, kernel) + p.ctas_before <= multiprocessors;
}

// True if a kernel starts while the one before it drains, to read weights meanwhile, and waits for its rows of a. A
// tiled kernel that takes the place of CTAs as they end took up to half as long again at large widths, but for clusters
// that share k (measured on an H100).
inline bool starts_early(const GemmProblem& p, const GemmKernel& kernel, int multiprocessors) {
  if (!p.follows_ours() || is_training(p.product())) return false;
  const bool one_round = ctas_of(p, kernel) <= multiprocessors;
  if (kernel.loop == MainLoop::kStreamed) return p.m <= kernel.block_m || one_round;
  if (kernel.product != Product::kPlain) return false;
  return kernel.split_k > 1 ? one_round : fits_beside_before(p, kernel, multiprocessors);
}

// Up to this many rows of a, rounded up to whole tiles, all tiled kernels wait for the weights rather than for the
// tensor cores, and tiles are spread evenly over the columns.
constexpr int64_t kEvenRows = 176;

// False if a kernel is asked to make an adapter's rows, and there is none that does.
inline bool takes_factor(const GemmProblem& p) {
  const LowRank& term = p.low_rank;
  return !term.makes_rows() ||
         (p.product() == Product::kPlain && p.m <= kMostRankTermRows && term.k <= kMostRankTermRanks);
}

// The rows of a streamed kernel's stage in which an adapter's factor lies, beside the columns of the tile.
inline int rows_of_factor(const GemmProblem& p) {
  constexpr int kSwizzle = 8;  // rows
  return !p.low_rank.makes_rows() ? 0 : static_cast<int>(ceil_div(p.low_rank.k, kSwizzle)) * kSwizzle;
}

// The columns of the widest tile whose code is the same with a mask of dropout and without.
constexpr int kWidestMasked = 128;

// The multiprocessors on which clusters of this many CTAs find room. A cluster lies within one GPC, and the GPCs have
// 16 or 18 multiprocessors each (H100 SXM): about a tenth of the chip is left over by clusters of 4 or 8.
constexpr int usable_multiprocessors(int multiprocessors, int cluster) {
  return cluster <= 2 ? multiprocessors : multiprocessors * 10 / 11;
}

}  // namespace fused_mlp::sm90
