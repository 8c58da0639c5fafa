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
constexpr StreamedTime kStreamedGated = {1.91741, 2.70688, 2.50607, 4.69472, 0.06581, 0.00491, 0.63584, 0.11652, 0.00175};
constexpr StreamedTime kStreamedActivated = {2.19679, 3.17495, 4.56356, 3.39809, 0.10381, 0.00088, 0.83022, 0.03182, 0.00156};
constexpr StreamedTime kStreamedPlain = {1.86514, 0.49969, 0.89754, 17.22812, 0.07769, 0.00125, 0.58366, 0.09365, 7e-05};
constexpr double kBytesPerMicrosecond = 2.8e6;

constexpr TorchRows kTorchPlain = {129, std::numeric_limits<int64_t>::max(),
    "as measured, cuBLAS is faster for a plain product of more than 128 rows"};
constexpr TorchRows kTorchActivated = {65, 256,
    "as measured, cuBLAS and a kernel behind it are faster for 65 to 256 rows"};
// clang-format on

}  // namespace fused_mlp::sm90
