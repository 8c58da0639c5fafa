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
    {256, false, 2, 1, 1.861, 0.528, 0.779, 0.0},
    {192, true, 2, 1, 3.69, 0.0, 0.56, 0.0},
    {256, false, 1, 1, 0.508, 0.0, 0.862, 0.0},
    {192, true, 1, 1, 1.724, 0.0, 0.656, 0.0},
    {224, false, 2, 1, 2.436, 0.083, 0.71, 0.0},
    {128, true, 2, 1, 3.599, 0.0, 0.398, 0.0},
    {128, false, 1, 1, 0.801, 0.0, 0.529, 0.0},
};
constexpr TiledTime kPlainTimes[] = {
    {256, false, 2, 1, 0.569, 0.0, 0.696, 4.34},
    {192, true, 2, 1, 4.158, 0.0, 0.5, 1.401},
    {192, false, 2, 1, 0.927, 0.0, 0.514, 3.957},
    {128, true, 2, 1, 3.183, 0.0, 0.352, 1.441},
    {128, false, 1, 1, 0.0, 0.0, 0.377, 3.569},
    {128, false, 1, 2, 0.0, 0.732, 0.464, 5.041},
    {128, false, 1, 4, 0.0, 2.66, 0.512, 3.091},
};
constexpr double kBytesPerMicrosecond = 2.8e6;

// Of the streamed kernel: CTAs a multiprocessor that saturate the memory, and what a part of k costs to add up, in
// blocks of k.
constexpr double kSaturating = 0.75;
constexpr double kReduction = 1.0;

constexpr TorchRows kTorchPlain = {65, std::numeric_limits<int64_t>::max(),
    "as measured, cuBLAS is faster for a plain product of more than 64 rows"};
constexpr TorchRows kTorchActivated = {17, 197,
    "as measured, cuBLAS and a kernel behind it are faster for 17 to 197 rows"};
// clang-format on

}  // namespace fused_mlp::sm90
