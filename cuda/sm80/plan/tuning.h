// The constants for the choice of sm_80's GEMMs, by compute capability.
#pragma once

#include <limits>

#include "../../gemm/problem.h"

namespace fused_mlp::sm80 {

// Rows of a and weight rows of the existing tiled kernels.
constexpr int kTiles[][2] = {{128, 256}, {256, 128}, {128, 128}, {64, 128}, {64, 64}};

// The default values are for GPUs that were never measured. On a Hopper GPU the two largest tiles and 128 x 128 were
// compared with other kernels that use mma.sync there (benchmarks/results/h200-mma-sync.json); the worst ratio of each,
// within 3%, is assumed to hold on all chips. Everything else is estimated.
struct Tuning {
  int major = 0, minor = 0;  // the capability of the GPUs that were measured
  bool withheld = false;     // ours was measured to be slower than estimated: torch computes everything
  // The fraction of the tensor cores' peak that the main loop of a tiled kernel reaches, in the order of kTiles.
  double of_peak[5] = {0.89, 0.87, 0.86, 0.74, 0.60};
  double share_of_bandwidth = 0.88;  // the fraction of nominal bandwidth that streamed kernels reach
  double start = 3.0;                // microseconds of a kernel, before its first and after its last product
  // torch's GEMM, at its best.
  double torch_of_peak = 0.93;
  double torch_share_of_bandwidth = 0.90;
  double torch_start = 2.5;  // microseconds per kernel

  constexpr bool measured() const { return major != 0; }
  // Our kernel is used if it is estimated to be faster even when its GEMM takes this much longer than estimated.
  constexpr double margin() const {
    return withheld ? std::numeric_limits<double>::infinity() : measured() ? 1.02 : 1.10;
  }
};

constexpr Tuning kTunings[] = {
#include "tuned.def"
    {},
};

constexpr double kTiledShareOfBandwidth = 0.70;  // for tiled kernels: they have few bytes in flight
// Training, as measured on an H200: the fraction of the main loop's speed with weights in transposed layout, and the
// fraction of the bandwidth that the epilogue of gradients reaches; little of it overlaps with the products.
constexpr double kLyingShare = 0.95;
constexpr double kGradientShareOfBandwidth = 0.90;
constexpr double kL2BytesPerCycle = 40.0;  // into one multiprocessor
constexpr double kBusyCtas = 2.0;          // CTAs per multiprocessor for the full read rate
constexpr double kLeastReach = 0.4;        // the fraction of the bandwidth that few CTAs reach
constexpr double kSoloReach = 1.5;         // times its share of the bandwidth, for a streamed CTA while others idle
constexpr double kL2Speedup = 3.0;         // for data that the pointwise kernel finds in L2, up to half of its size

}  // namespace fused_mlp::sm80
