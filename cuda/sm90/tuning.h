// What the sm_90a GEMMs choose by, made by `make tune` on NVIDIA H100 80GB HBM3.
// How it is fitted is in tools/tuning/fit.py.
#pragma once

#include <cstdint>
#include <limits>

namespace fused_mlp::sm90 {

// A tiled kernel and its time, in microseconds: a start, and for every round of tiles (as many as the chip holds at
// once) a part of its own, one for each 64 elements of k, and one for an activation without a gate.
struct TiledTime {
  int block_n;
  bool ping_pong;
  int multicast;
  int split_k;
  double start, round, k_block, activation;
};

// Rows of a, from first to last, at which torch's GEMM is faster.
struct TorchRows {
  int64_t first, last;
  const char* reason;
};

// clang-format off
constexpr TiledTime kGatedTimes[] = {
    {256, false, 2, 1, 2.88, 1.11, 0.717, 0.0},
    {192, true, 2, 1, 5.07, 0.0, 0.523, 0.0},
    {224, false, 2, 1, 3.53, 0.41, 0.656, 0.0},
    {128, true, 2, 1, 4.5, 0.0, 0.397, 0.0},
    {128, false, 1, 1, 0.84, 0.0, 0.537, 0.0},
};
constexpr TiledTime kPlainTimes[] = {
    {256, false, 2, 1, 0.0, 1.99, 0.627, 5.12},
    {192, true, 2, 1, 0.0, 3.78, 0.466, 0.0},
    {192, false, 2, 1, 0.0, 2.57, 0.47, 3.84},
    {128, true, 2, 1, 0.0, 1.9, 0.362, 0.0},
    {128, false, 1, 1, 0.0, 3.0, 0.37, 2.56},
    {128, false, 1, 2, 0.0, 3.25, 0.423, 1.28},
    {128, false, 1, 4, 0.0, 4.2, 0.467, 0.64},
};
constexpr double kBytesPerMicrosecond = 2.8e6;

// Of the streamed kernel: CTAs a multiprocessor that saturate the memory, and what a part of k costs to add up, in
// blocks of k.
constexpr double kSaturating = 1.5;
constexpr double kReduction = 2.0;

constexpr TorchRows kTorchPlain = {65, std::numeric_limits<int64_t>::max(),
    "as measured, cuBLAS is faster for a plain product of more than 64 rows"};
constexpr TorchRows kTorchActivated = {17, 256,
    "as measured, cuBLAS and a kernel behind it are faster for 17 to 256 rows"};
// clang-format on

}  // namespace fused_mlp::sm90
