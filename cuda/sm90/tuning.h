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
    {128, 192, true, 1, 2.551, 0.0, 0.495, 0.0},
    {128, 160, true, 1, 2.418, 0.0, 0.413, 0.0},
    {128, 128, true, 1, 1.835, 0.0, 0.335, 0.0},
    {128, 128, false, 1, 1.025, 0.52, 0.359, 0.0},
    {144, 256, false, 1, 1.519, 0.319, 0.819, 0.0},
    {160, 256, false, 1, 1.963, 0.335, 0.909, 0.0},
    {160, 128, false, 1, 0.971, 0.639, 0.453, 0.0},
    {224, 128, false, 1, 0.5, 1.549, 0.615, 0.0},
};
constexpr TiledTime kTiledPlain[] = {
    {128, 192, true, 1, 2.724, 0.0, 0.454, 1.975},
    {128, 160, true, 1, 3.204, 0.0, 0.386, 1.397},
    {128, 128, true, 1, 1.763, 0.0, 0.315, 1.282},
    {128, 128, false, 2, 0.0, 2.674, 0.412, 2.375},
    {128, 128, false, 4, 0.0, 3.884, 0.402, 1.616},
    {144, 256, false, 1, 0.0, 0.0, 0.75, 5.813},
    {160, 128, false, 1, 0.162, 0.0, 0.398, 3.502},
    {208, 128, false, 1, 0.0, 0.0, 0.525, 3.23},
    {96, 128, false, 1, 0.54, 0.032, 0.239, 2.391},
};
constexpr StreamedTime kStreamedGated = {2.30063, 1.99877, 0.12438, 0.43571, 0.12714, 0.0015, 1.14673, 0.03965, 0.00228};
constexpr StreamedTime kStreamedActivated = {2.37797, 1.48853, 0.07836, 0.22069, 0.04567, 0.0008, 1.01242, 0.04467, 0.00105};
constexpr StreamedTime kStreamedPlain = {1.88578, 1.75954, 0.00356, 0.00449, 0.06095, 0.00082, 0.69514, 0.02157, 0.00037};
constexpr double kBytesPerMicrosecond = 2.8e6;

constexpr TorchRows kTorchPlain = {78, std::numeric_limits<int64_t>::max(),
    "as measured, cuBLAS is faster for a plain product of more than 77 rows"};
constexpr TorchRows kTorchActivated = {65, 77,
    "as measured, cuBLAS is faster for one layer with an activation and 65 to 77 rows"};
constexpr TorchRows kTorchEpilogue = {49, 256,
    "as measured, cuBLAS can be faster for one layer with an activation and 49 to 256 rows"};
// clang-format on

}  // namespace fused_mlp::sm90
