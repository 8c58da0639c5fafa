// The constants by which the GEMMs of sm_80 are chosen, by compute capability.
#pragma once

#include <limits>

#include "../../gemm/problem.h"

namespace fused_mlp::sm80 {

// Rows of a and weight rows of the tiled kernels that there are.
constexpr int kTiles[][2] = {{128, 256}, {256, 128}, {128, 128}, {64, 128}, {64, 64}};

// The values here are for GPUs that nobody has measured. On a Hopper GPU it was measured how the two largest tiles and
// 128 x 128 compare with what else multiplies by mma.sync there (benchmarks/results/h200-mma-sync.json): the worst
// ratio of each, within 3%, is taken to be the same on all chips. All else is estimated.
struct Tuning {
  int major = 0, minor = 0;  // the capability of the GPUs that were measured
  bool withheld = false;     // where ours was measured to be slower than estimated: all is torch's
  // The share of the tensor cores' peak that the main loop of a tiled kernel reaches, in the order of kTiles.
  double of_peak[5] = {0.89, 0.87, 0.86, 0.74, 0.60};
  double share_of_bandwidth = 0.88;  // what streamed kernels reach of the memory's nominal bandwidth
  double start = 3.0;                // microseconds of a kernel, before its first and after its last product
  // torch's way, at its best.
  double torch_of_peak = 0.93;
  double torch_share_of_bandwidth = 0.90;
  double torch_start = 2.5;  // microseconds of every kernel

  constexpr bool measured() const { return major != 0; }
  // Ours is taken where it is estimated to be the faster way even if its GEMM takes this much longer than estimated.
  constexpr double margin() const {
    return withheld ? std::numeric_limits<double>::infinity() : measured() ? 1.02 : 1.10;
  }
};

constexpr Tuning kTunings[] = {
#include "tuned.def"
    {},
};

constexpr double kTiledShareOfBandwidth = 0.70;  // by tiled kernels: few of their bytes are on their way at a time
// Training, as measured on an H200: the share of the main loop's speed where weights are read as they lie,
// and the share of the bandwidth that the epilogue of gradients reaches, which the products hide little of.
constexpr double kLyingShare = 0.95;
constexpr double kGradientShareOfBandwidth = 0.90;
constexpr double kL2BytesPerCycle = 40.0;  // that reach one multiprocessor
constexpr double kBusyCtas = 2.0;          // CTAs of a multiprocessor that reads as fast as it can
constexpr double kLeastReach = 0.4;        // what few CTAs reach of the bandwidth
constexpr double kSoloReach = 1.5;         // times its share of the bandwidth, for a streamed CTA while others idle
constexpr double kL2Speedup = 3.0;         // for what the pointwise kernel finds there, up to half of its size

}  // namespace fused_mlp::sm80
