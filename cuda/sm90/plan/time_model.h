// The time of a kernel, estimated. tools/tuning fits the constants to measured times by these same functions.
#pragma once

#include "../../gemm/problem.h"

namespace fused_mlp::sm90 {

// The time depends on these besides: the chip at hand, next to the one that the constants were measured on.
struct Chip {
  int multiprocessors;
  double bytes_per_microsecond;  // its memory's, as far as kernels reach it
  double clock;                  // 1 for that of the other chip
};

// The chip that the constants were measured on, as its driver describes it.
struct MeasuredOn {
  int multiprocessors;
  double cycles_per_microsecond, bytes_per_microsecond;
};

// A tiled kernel works in rounds of as many tiles as the chip holds at once. Microseconds:
// start + rounds * (round + k_block * (blocks of 64 elements of k) + activation), where the last term is for an
// activation without a gate. Where a cluster splits k, `round` is the time of adding up its sums.
struct TiledTime {
  double start, round, k_block, activation;
};

// A streamed kernel. Microseconds: start + wide + (cta + result * rows * columns) * most + split +
// (blocks of 64 elements of k per CTA) * block, where block = k_block + k_row * rows +
// (shared_k_column * columns + shared_k_row * rows) * most, rows is that of a tile, columns its weight rows; wide is
// for tiles of more than kStreamedColumns columns; most is the CTAs of the multiprocessor that has most of them; split
// is split_2 where k has at least 2 parts, plus split_4 and split_8 likewise. The time that the bytes take at least is
// longer by tail * (the part of the chip that would be idle if all multiprocessors waited for that one), by what the
// last round of CTAs loses if they do not all find room at once, and at least what the L2 cache takes to send all of
// it.
struct StreamedTime {
  double start, wide, cta, split_2, split_4, split_8, k_block, k_row, shared_k_column, shared_k_row, tail, result;
};

// torch's GEMM, as if it had tiles of 64 x 64 and of 128 x 128, computed in rounds of one for each multiprocessor, with
// k whole or in 2, 4 or 8 parts, and took the best. Microseconds: start + rounds * (blocks of 64 elements of k) *
// (small_block or large_block) + split, where k has parts; or start + the time of the bytes at this share of the
// bandwidth, if that is longer. An activation takes pointwise_start more, and the time of its bytes: those that L2 does
// not hold, at pointwise_share of the bandwidth.
struct TorchTime {
  double start, share_of_bandwidth, small_block, large_block, split, pointwise_start, pointwise_share;
};

// A tiled kernel and its constants. All streamed kernels of a product have the same: some for fewer than kTiledRows
// rows, some for fewer than kTallRows, and some for more.
struct TunedKernel {
  GemmKernel kernel;
  TiledTime time;
};

double estimated_microseconds(const GemmProblem& problem, const GemmKernel& kernel, const TiledTime& constants,
                              const Chip& chip);
double estimated_microseconds(const GemmProblem& problem, const GemmKernel& kernel, const StreamedTime& constants,
                              const Chip& chip);
// The part of that which a kernel hides behind the GEMM before it.
double hidden_microseconds(const GemmProblem& problem, const GemmKernel& kernel, const Chip& chip);
// The time of torch's GEMM, or of its two, with the pointwise kernel behind.
double torch_microseconds(const GemmProblem& problem, const TorchTime& constants, const Chip& chip);

}  // namespace fused_mlp::sm90
