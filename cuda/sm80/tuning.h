// The constants by which the GEMMs of sm_80 are chosen. On a Hopper GPU it was measured how they compare with what else
// multiplies by mma.sync there (benchmarks/results/h200-mma-sync.json), and that ratio is taken to be the same on all
// chips; all else here is estimated.
#pragma once

#include "../gemm/problem.h"

namespace fused_mlp::sm80 {

// The share of the tensor cores' peak that the main loop of a tiled kernel reaches, where torch's reaches
// kTorchShareOfPeak. The two largest follow from the worst ratio to cuBLASLt that was measured of the tile.
struct TiledShare {
  int block_m, block_n;
  double of_peak;
};
constexpr TiledShare kTiledShares[] = {
    {128, 256, 0.89}, {256, 128, 0.87}, {128, 128, 0.86}, {64, 128, 0.74}, {64, 64, 0.60},
};

constexpr double kShareOfBandwidth = 0.88;       // of the memory's nominal bandwidth, by streamed kernels
constexpr double kTiledShareOfBandwidth = 0.70;  // by tiled ones: few of their bytes are on their way at a time
constexpr double kStartMicroseconds = 3.0;       // of a kernel, before its first and after its last product
constexpr double kL2BytesPerCycle = 40.0;        // that reach one multiprocessor
constexpr double kBusyCtas = 2.0;                // of a multiprocessor that reads as fast as it can
constexpr double kLeastReach = 0.4;              // of the bandwidth, by few CTAs

// torch's way, at its best.
constexpr double kTorchShareOfPeak = 0.93;
constexpr double kTorchShareOfBandwidth = 0.90;
constexpr double kTorchStartMicroseconds = 2.5;  // of every kernel
constexpr double kL2Speedup = 3.0;               // of what the pointwise kernel finds in L2, up to half of its size

// Ours is taken where it is estimated to be the faster way even if its GEMM takes this much longer than estimated.
constexpr double kMargin = 1.10;

}  // namespace fused_mlp::sm80
