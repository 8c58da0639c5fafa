// The estimated time of a kernel. tools/tuning fits the constants to measured times with these same functions.
#pragma once

#include "../../gemm/problem.h"

namespace fused_mlp::sm90 {

// The current chip, relative to the one on which the constants were measured; the time also depends on it.
struct Chip {
  int multiprocessors;
  double bytes_per_microsecond;  // of the memory, as far as kernels reach it
  double clock;                  // 1 for that of the measured chip
};

// The chip on which the constants were measured, as its driver describes it.
struct MeasuredOn {
  int multiprocessors;
  double cycles_per_microsecond, bytes_per_microsecond;
};

// A tiled kernel works in rounds of as many tiles as the chip holds at once. Microseconds: start + rounds * (round +
// k_block * (blocks of 64 elements of k) + activation), where the last term is for an activation without a gate. If a
// cluster splits k, `round` is the time of adding up its sums.
struct TiledTime {
  double start, round, k_block, activation;
};

// A streamed kernel. Microseconds: start + wide + (cta + result * rows * columns) * most + split + (blocks of 64
// elements of k per CTA) * block, where block = k_block + k_row * rows + (shared_k_column * columns + shared_k_row *
// rows) * most. rows is that of a tile, columns its weight rows; wide is for tiles of more than kStreamedColumns
// columns; most is the number of CTAs on the fullest multiprocessor; split is split_2 if k has at least 2 parts, plus
// split_4 and split_8 likewise. The lower bound by bytes is extended by tail * (the part of the chip that would be idle
// if all multiprocessors waited for that one), and by the loss of the last round of CTAs if they do not all fit at
// once; it is at least the time that the L2 cache takes to send all of it.
struct StreamedTime {
  double start, wide, cta, split_2, split_4, split_8, k_block, k_row, shared_k_column, shared_k_row, tail, result;
};

// torch's GEMM, as if it had tiles of 64 x 64 and of 128 x 128, computed in rounds of one per multiprocessor, with k
// whole or in 2, 4 or 8 parts, and used the best. Microseconds: start + rounds * (blocks of 64 elements of k) *
// (small_block or large_block) + split, if k has parts; or start + the time of the bytes at this share of the
// bandwidth, if that is longer. An activation adds pointwise_start, and the time of its bytes: those that L2 does not
// hold, at pointwise_share of the bandwidth.
struct TorchTime {
  double start, share_of_bandwidth, small_block, large_block, split, pointwise_start, pointwise_share;
};

// A tiled kernel and its constants. All streamed kernels of a product share their constants: one set for fewer than
// kTiledRows rows, one for fewer than kTallRows, and one for more.
struct TunedKernel {
  GemmKernel kernel;
  TiledTime time;
};

double estimated_microseconds(const GemmProblem& problem, const GemmKernel& kernel, const TiledTime& constants,
                              const Chip& chip);
double estimated_microseconds(const GemmProblem& problem, const GemmKernel& kernel, const StreamedTime& constants,
                              const Chip& chip);
// The part of that time which a kernel hides behind the GEMM before it.
double hidden_microseconds(const GemmProblem& problem, const GemmKernel& kernel, const Chip& chip);
// The time of torch's GEMM, or of its two, and of the pointwise kernel after it.
double torch_microseconds(const GemmProblem& problem, const TorchTime& constants, const Chip& chip);

}  // namespace fused_mlp::sm90
