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
// (`saturating` a multiprocessor), as the splits are too, and one for every round of CTAs, one a multiprocessor. What
// the bytes take at least grows with the part of the chip that is idle in the last round of as many as it holds.
struct StreamedTime {
  double start, split_2, split_4, split_8, k_block, k_row, saturating, round_k_block, round_k_row, tail;
};

// Rows of a, from first to last, at which torch's GEMM is faster: for a plain product, and with a pointwise kernel
// behind it.
struct TorchRows {
  int64_t first, last;
  const char* reason;
};

// clang-format off
constexpr TiledTime kTiledGated[] = {
    {128, 192, true, 1, 2.309, 0.0, 0.526, 0.0},
    {128, 176, true, 1, 2.583, 0.0, 0.486, 0.0},
    {128, 160, true, 1, 2.406, 0.0, 0.441, 0.0},
    {128, 144, true, 1, 2.585, 0.0, 0.401, 0.0},
    {128, 128, true, 1, 1.99, 0.0, 0.354, 0.0},
    {128, 224, false, 1, 1.331, 0.315, 0.663, 0.0},
    {128, 128, false, 1, 0.824, 0.998, 0.356, 0.0},
    {144, 256, false, 1, 0.511, 1.132, 0.866, 0.0},
    {64, 128, false, 1, 1.331, 0.529, 0.248, 0.0},
    {96, 128, false, 1, 0.831, 0.695, 0.311, 0.0},
    {160, 128, false, 1, 0.529, 1.172, 0.459, 0.0},
    {224, 128, false, 1, 0.0, 1.823, 0.641, 0.0},
};
constexpr TiledTime kTiledPlain[] = {
    {128, 192, true, 1, 2.297, 0.0, 0.476, 2.094},
    {128, 160, true, 1, 2.658, 0.0, 0.403, 1.524},
    {128, 144, true, 1, 2.469, 0.0, 0.376, 1.612},
    {128, 128, true, 1, 1.721, 0.0, 0.329, 1.524},
    {128, 128, false, 4, 0.0, 3.75, 0.387, 1.226},
    {48, 128, false, 1, 0.907, 0.114, 0.17, 1.132},
    {64, 128, false, 1, 0.587, 0.329, 0.188, 1.234},
    {80, 128, false, 1, 0.358, 0.666, 0.219, 1.303},
    {96, 128, false, 1, 0.0, 0.926, 0.259, 1.628},
    {112, 128, false, 1, 0.056, 1.071, 0.291, 1.22},
    {160, 128, false, 1, 0.0, 1.11, 0.433, 2.363},
    {208, 128, false, 1, 0.0, 0.852, 0.56, 2.419},
};
constexpr StreamedTime kStreamedGated = {2.15956, 1.93629, 0.00269, 0.24159, 0.1241, 0.00136, 0.97801, 0.04729, 0.00153, 0.24763};
constexpr StreamedTime kStreamedActivated = {2.52557, 1.26828, 0.00979, 0.14928, 0.07494, 0.00093, 0.84192, 0.01192, 0.0007, 0.23982};
constexpr StreamedTime kStreamedPlain = {2.41456, 1.13505, 0.11978, 0.25553, 0.08623, 0.00018, 0.76343, 9e-05, 0.00122, 0.44526};
constexpr double kBytesPerMicrosecond = 3.0e6;
constexpr double kFlopsPerMicrosecond = 750e6;

constexpr TorchRows kTorchPlain = {9, std::numeric_limits<int64_t>::max(),
    "as measured, cuBLAS is mostly faster for a plain product of more than 8 rows"};
constexpr TorchRows kTorchActivated = {0, -1, nullptr};
// A plain product among torch's rows, of up to so many, is ours for all that where the estimate is up to so many times
// what bytes and arithmetic take at least: torch's can hardly be faster.
constexpr int64_t kNearFloorRows = 640;
constexpr double kNearFloor = 1.2;
// clang-format on

}  // namespace fused_mlp::sm90
