// What the sm_90a GEMMs choose by, made by `make tune` on NVIDIA H100 80GB HBM3.
// How it is fitted is in tools/tuning/fit.py.
#pragma once

#include <cstdint>
#include <limits>

namespace fused_mlp::sm90 {

// A tiled kernel, and its time in microseconds: a start, and for every round of tiles (as many as the chip holds at
// once) a part of its own, one for each 64 elements of k, and one for an activation without a gate.
struct TiledTime {
  int block_n;
  bool ping_pong;
  int multicast;
  int split_k;
  double start, round, k_block, activation;
};

// The time of the streamed kernels: a start, what is added where k is split in 2, 4 or 8, and a part for each 64
// elements of k that a CTA reads and each of its rows: one as the CTAs exceed what saturates the chip (`saturating` a
// multiprocessor), and one for every round of CTAs, one a multiprocessor.
struct StreamedTime {
  double start, split_2, split_4, split_8, k_block, k_row, saturating, round_k_block, round_k_row;
};

// Rows of a, from first to last, at which torch's GEMM is faster.
struct TorchRows {
  int64_t first, last;
  const char* reason;
};

// clang-format off
constexpr TiledTime kTiledGated[] = {
    {256, false, 2, 1, 3.166, 0.856, 0.726, 0.0},
    {192, true, 2, 1, 4.632, 0.0, 0.541, 0.0},
    {256, false, 1, 1, 1.841, 0.0, 0.797, 0.0},
    {192, true, 1, 1, 2.663, 0.0, 0.562, 0.0},
    {224, false, 2, 1, 3.52, 0.391, 0.668, 0.0},
    {128, true, 2, 1, 3.977, 0.0, 0.401, 0.0},
    {128, false, 1, 1, 1.758, 0.0, 0.422, 0.0},
};
constexpr TiledTime kTiledPlain[] = {
    {256, false, 2, 1, 0.759, 0.0, 0.682, 4.905},
    {192, true, 2, 1, 4.11, 0.0, 0.489, 1.945},
    {192, false, 2, 1, 1.286, 0.0, 0.505, 4.106},
    {128, true, 2, 1, 2.905, 0.0, 0.342, 1.916},
    {128, false, 1, 1, 0.419, 0.0, 0.348, 2.826},
    {128, false, 1, 2, 0.0, 2.81, 0.417, 3.101},
    {128, false, 1, 4, 0.0, 3.788, 0.48, 1.954},
};
constexpr StreamedTime kStreamedGated = {2.90509, 2.47906, 10.92204, 5.81562, 0.00061, 0.00483, 0.59017, 0.05083, 0.00068};
constexpr StreamedTime kStreamedActivated = {2.81369, 3.6633, 18.3068, 13.29192, 0.00048, 0.00123, 1.86327, 0.0541, 0.00152};
constexpr StreamedTime kStreamedPlain = {2.09008, 1.22125, 1.39228, 36.12401, 0.06513, 0.00164, 0.56406, 0.01126, 0.0};
constexpr double kBytesPerMicrosecond = 2.8e6;

constexpr TorchRows kTorchPlain = {129, std::numeric_limits<int64_t>::max(),
    "as measured, cuBLAS is faster for a plain product of more than 128 rows"};
constexpr TorchRows kTorchActivated = {78, 256,
    "as measured, cuBLAS is faster for one layer with an activation and 78 to 256 rows"};
// clang-format on

}  // namespace fused_mlp::sm90
