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
    {256, false, 2, 1, 2.745, 0.246, 0.785, 0.0},
    {192, true, 2, 1, 3.437, 0.0, 0.563, 0.0},
    {256, false, 1, 1, 0.815, 0.0, 0.843, 0.0},
    {192, true, 1, 1, 1.813, 0.0, 0.635, 0.0},
    {224, false, 2, 1, 2.199, 0.218, 0.714, 0.0},
    {128, true, 2, 1, 4.046, 0.0, 0.398, 0.0},
    {128, false, 1, 1, 1.148, 0.0, 0.506, 0.0},
};
constexpr TiledTime kTiledPlain[] = {
    {256, false, 2, 1, 1.05, 0.0, 0.689, 4.562},
    {192, true, 2, 1, 4.362, 0.0, 0.504, 1.258},
    {192, false, 2, 1, 1.217, 0.0, 0.517, 3.78},
    {128, true, 2, 1, 3.564, 0.0, 0.346, 1.546},
    {128, false, 1, 1, 0.0, 0.0, 0.371, 3.464},
    {128, false, 1, 2, 0.0, 2.566, 0.426, 3.386},
    {128, false, 1, 4, 0.0, 3.75, 0.471, 2.131},
};
constexpr StreamedTime kStreamedGated = {2.88424, 1.097, 1.3331, 2.39031, 0.05189, 0.00611, 0.60298, 0.07222, 0.00187};
constexpr StreamedTime kStreamedActivated = {3.0957, 1.34577, 3.99928, 3.52323, 0.03014, 0.00112, 1.85241, 0.04133, 0.00156};
constexpr StreamedTime kStreamedPlain = {2.00175, 1.0685, 1.0771, 8.12436, 0.07877, 0.00132, 0.57972, 0.08882, 7e-05};
constexpr double kBytesPerMicrosecond = 2.8e6;

constexpr TorchRows kTorchPlain = {129, std::numeric_limits<int64_t>::max(),
    "as measured, cuBLAS is faster for a plain product of more than 128 rows"};
constexpr TorchRows kTorchActivated = {257, 384,
    "as measured, cuBLAS and a kernel behind it are faster for 257 to 384 rows"};
// clang-format on

}  // namespace fused_mlp::sm90
