// What the sm_90a GEMMs choose by, made by `make tune` on NVIDIA H100 80GB HBM3.
// How it is fitted is in tools/tuning/fit.py.
#pragma once

#include <cstdint>
#include <limits>

namespace fused_mlp::sm90 {

// A tiled kernel, and its time in microseconds: a start, and for every round of tiles (as many as the chip holds at
// once) a part of its own, one for each 64 elements of k, and one for an activation without a gate.
struct TiledTime {
  int block_m;
  int block_n;
  bool ping_pong;
  int split_k;
  double start, round, k_block, activation;
};

// The time of the streamed kernels: a start, what is added where k is split in 2, from 4 parts on and from 8, and a
// part for each 64 elements of k that a CTA reads and each of its rows: one as the CTAs exceed what saturates the chip
// (`saturating` a multiprocessor), as the splits are too, and one for every round of CTAs, one a multiprocessor.
struct StreamedTime {
  double start, split_2, split_4, split_8, k_block, k_row, saturating, round_k_block, round_k_row;
};

// Rows of a, from first to last, at which torch's GEMM is faster: for a plain product, with a pointwise kernel behind
// it, and with the activation in its epilogue.
struct TorchRows {
  int64_t first, last;
  const char* reason;
};

// clang-format off
constexpr TiledTime kTiledGated[] = {
    {128, 192, true, 1, 2.683, 0.0, 0.51, 0.0},
    {128, 160, true, 1, 2.672, 0.0, 0.428, 0.0},
    {128, 128, true, 1, 2.037, 0.0, 0.349, 0.0},
    {128, 128, false, 1, 1.527, 0.3, 0.353, 0.0},
    {144, 256, false, 1, 1.616, 0.263, 0.829, 0.0},
    {160, 256, false, 1, 1.748, 0.292, 0.896, 0.0},
    {160, 128, false, 1, 1.458, 0.473, 0.444, 0.0},
    {224, 128, false, 1, 0.472, 1.452, 0.64, 0.0},
};
constexpr TiledTime kTiledPlain[] = {
    {128, 192, true, 1, 2.383, 0.0, 0.442, 2.258},
    {128, 160, true, 1, 3.012, 0.0, 0.376, 1.697},
    {128, 128, true, 1, 1.787, 0.0, 0.308, 1.447},
    {128, 128, false, 2, 0.0, 2.936, 0.423, 2.14},
    {128, 128, false, 4, 0.0, 3.919, 0.404, 1.695},
    {144, 256, false, 1, 0.0, 0.0, 0.759, 5.015},
    {160, 128, false, 1, 0.148, 0.0, 0.4, 3.435},
    {208, 128, false, 1, 0.0, 0.0, 0.519, 3.482},
    {96, 128, false, 1, 0.523, 0.026, 0.241, 2.391},
};
constexpr StreamedTime kStreamedGated = {2.40183, 1.92386, 0.12966, 0.4425, 0.09661, 0.00103, 1.11891, 0.06535, 0.00235};
constexpr StreamedTime kStreamedActivated = {3.01972, 1.10304, 0.17007, 0.35219, 0.04456, 0.001, 0.95486, 0.02647, 0.00108};
constexpr StreamedTime kStreamedPlain = {1.99508, 1.42601, 0.03436, 0.49883, 0.07293, 0.00094, 0.68629, 0.00341, 0.00036};
constexpr double kBytesPerMicrosecond = 2.8e6;

constexpr TorchRows kTorchPlain = {78, std::numeric_limits<int64_t>::max(),
    "as measured, cuBLAS is faster for a plain product of more than 77 rows"};
constexpr TorchRows kTorchActivated = {0, -1, nullptr};
constexpr TorchRows kTorchEpilogue = {49, 256,
    "as measured, cuBLAS can be faster for one layer with an activation and 49 to 256 rows"};
// clang-format on

}  // namespace fused_mlp::sm90
