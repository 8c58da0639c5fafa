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
    {128, 192, true, 1, 2.534, 0.0, 0.5, 0.0},
    {128, 160, true, 1, 2.261, 0.0, 0.419, 0.0},
    {128, 128, true, 1, 2.067, 0.0, 0.337, 0.0},
    {128, 128, false, 1, 0.864, 0.533, 0.392, 0.0},
    {144, 256, false, 1, 1.468, 0.236, 0.844, 0.0},
    {160, 256, false, 1, 1.695, 0.314, 0.945, 0.0},
    {160, 128, false, 1, 0.889, 0.431, 0.474, 0.0},
    {224, 128, false, 1, 0.522, 1.552, 0.619, 0.0},
};
constexpr TiledTime kTiledPlain[] = {
    {128, 192, true, 1, 2.461, 0.0, 0.455, 2.323},
    {128, 160, true, 1, 3.115, 0.0, 0.386, 1.701},
    {128, 128, true, 1, 1.702, 0.0, 0.322, 1.054},
    {128, 128, false, 2, 0.0, 2.414, 0.43, 2.796},
    {128, 128, false, 4, 0.0, 3.932, 0.388, 1.483},
    {144, 256, false, 1, 0.0, 0.0, 0.725, 7.204},
    {160, 128, false, 1, 0.145, 0.0, 0.397, 4.203},
    {208, 128, false, 1, 0.0, 0.0, 0.543, 3.355},
    {96, 128, false, 1, 0.529, 0.03, 0.238, 2.438},
};
constexpr StreamedTime kStreamedGated = {2.53745, 1.09554, 4.6577, 1.14593, 0.04799, 0.00591, 0.68227, 0.04305, 0.00034};
constexpr StreamedTime kStreamedActivated = {2.70004, 1.04174, 4.73546, 4.74567, 0.04173, 0.00177, 0.71177, 0.01549, 0.00088};
constexpr StreamedTime kStreamedPlain = {1.90675, 0.29296, 1.00639, 2.43484, 0.08569, 0.00131, 0.60859, 0.03424, 0.00025};
constexpr double kBytesPerMicrosecond = 2.8e6;

constexpr TorchRows kTorchPlain = {78, std::numeric_limits<int64_t>::max(),
    "as measured, cuBLAS is faster for a plain product of more than 77 rows"};
constexpr TorchRows kTorchActivated = {78, 104,
    "as measured, cuBLAS is faster for one layer with an activation and 78 to 104 rows"};
// clang-format on

}  // namespace fused_mlp::sm90
