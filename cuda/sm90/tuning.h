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
    {256, false, 2, 1, 1.814, 0.658, 0.788, 0.0},
    {192, true, 2, 1, 4.323, 0.0, 0.565, 0.0},
    {256, false, 1, 1, 0.499, 0.0, 0.873, 0.0},
    {192, true, 1, 1, 2.223, 0.0, 0.656, 0.0},
    {224, false, 2, 1, 2.667, 0.0, 0.722, 0.0},
    {128, true, 2, 1, 3.954, 0.0, 0.409, 0.0},
    {128, false, 1, 1, 1.019, 0.0, 0.526, 0.0},
};
constexpr TiledTime kPlainTimes[] = {
    {256, false, 2, 1, 0.672, 0.0, 0.702, 4.731},
    {192, true, 2, 1, 4.665, 0.0, 0.504, 1.642},
    {192, false, 2, 1, 0.855, 0.0, 0.52, 4.165},
    {128, true, 2, 1, 3.589, 0.0, 0.353, 1.439},
    {128, false, 1, 1, 0.0, 0.0, 0.38, 3.714},
    {128, false, 1, 2, 0.0, 0.819, 0.464, 5.099},
    {128, false, 1, 4, 0.0, 2.807, 0.512, 3.071},
};
constexpr double kBytesPerMicrosecond = 2.8e6;

// Of the streamed kernel: CTAs a multiprocessor that saturate the memory, and what a part of k costs to add up, in
// blocks of k.
constexpr double kSaturating = 0.75;
constexpr double kReduction = 1.0;

constexpr TorchRows kTorchPlain = {65, std::numeric_limits<int64_t>::max(),
    "as measured, cuBLAS is faster for a plain product of more than 64 rows"};
constexpr TorchRows kTorchActivated = {17, 384,
    "as measured, cuBLAS and a kernel behind it are faster for 17 to 384 rows"};
// clang-format on

}  // namespace fused_mlp::sm90
