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
    {256, false, 2, 1, 2.54, 0.126, 0.779, 0.0},
    {192, true, 2, 1, 4.402, 0.0, 0.558, 0.0},
    {224, false, 2, 1, 3.063, 0.0, 0.699, 0.0},
    {128, true, 2, 1, 4.013, 0.0, 0.406, 0.0},
    {128, false, 1, 1, 1.196, 0.0, 0.521, 0.0},
};
constexpr TiledTime kPlainTimes[] = {
    {256, false, 2, 1, 0.368, 0.0, 0.71, 4.818},
    {192, true, 2, 1, 4.458, 0.0, 0.51, 1.702},
    {192, false, 2, 1, 0.758, 0.0, 0.524, 4.211},
    {128, true, 2, 1, 3.506, 0.0, 0.356, 1.462},
    {128, false, 1, 1, 0.0, 0.0, 0.38, 3.768},
    {128, false, 1, 2, 0.0, 0.877, 0.467, 5.045},
    {128, false, 1, 4, 0.0, 2.905, 0.513, 3.019},
};
constexpr double kBytesPerMicrosecond = 2.8e6;

// Of the streamed kernel: CTAs a multiprocessor that saturate the memory, and what a part of k costs to add up, in
// blocks of k.
constexpr double kSaturating = 1.25;
constexpr double kReduction = 2.0;

constexpr TorchRows kTorchPlain = {65, std::numeric_limits<int64_t>::max(),
    "as measured, cuBLAS is faster for a plain product of more than 64 rows"};
constexpr TorchRows kTorchActivated = {17, 384,
    "as measured, cuBLAS and a kernel behind it are faster for 17 to 384 rows"};
// clang-format on

}  // namespace fused_mlp::sm90
