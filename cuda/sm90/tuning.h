// What the sm_90a GEMMs choose by, made by `make tune` on NVIDIA H100 80GB HBM3.
// How it is fitted is in tools/tuning/fit.py.
#pragma once

#include <cstdint>
#include <limits>

namespace fused_mlp::sm90 {

// A kernel for more than 64 rows, and its time in microseconds: a start, and for every round of tiles (as many as the
// chip holds at once) a part of its own, one for each 64 elements of k, and one for an activation without a gate.
struct KernelTime {
  bool streamed;
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
constexpr KernelTime kGatedTimes[] = {
    {false, 256, false, 2, 1, 1.888, 0.312, 0.791, 0.0},
    {false, 192, true, 2, 1, 3.63, 0.0, 0.562, 0.0},
    {false, 256, false, 1, 1, 0.449, 0.0, 0.86, 0.0},
    {false, 192, true, 1, 1, 1.46, 0.0, 0.643, 0.0},
    {false, 224, false, 2, 1, 2.166, 0.208, 0.716, 0.0},
    {false, 128, true, 2, 1, 3.349, 0.0, 0.402, 0.0},
    {false, 128, false, 1, 1, 0.169, 0.0, 0.518, 0.0},
};
constexpr KernelTime kPlainTimes[] = {
    {false, 256, false, 2, 1, 0.65, 0.0, 0.695, 4.541},
    {false, 192, true, 2, 1, 4.318, 0.0, 0.499, 1.433},
    {false, 192, false, 2, 1, 0.945, 0.0, 0.514, 3.986},
    {false, 128, true, 2, 1, 3.147, 0.0, 0.351, 1.444},
    {false, 128, false, 1, 1, 0.0, 0.0, 0.374, 3.394},
    {false, 128, false, 1, 2, 0.0, 1.1, 0.451, 4.466},
    {false, 128, false, 1, 4, 0.0, 2.676, 0.509, 2.864},
    {true, 128, false, 1, 2, 3.032, 0.0, 0.31, 1.406},
    {true, 128, false, 1, 4, 2.834, 0.133, 0.306, 1.585},
    {true, 128, false, 1, 8, 2.695, 0.427, 0.389, 1.406},
};
constexpr double kBytesPerMicrosecond = 2.8e6;

// Of the streamed kernel for up to 64 rows: CTAs a multiprocessor that saturate the memory, and what a part of k costs
// to add up, in blocks of k.
constexpr double kSaturating = 1.25;
constexpr double kReduction = 2.0;

constexpr TorchRows kTorchPlain = {65, std::numeric_limits<int64_t>::max(),
    "as measured, cuBLAS is faster for a plain product of more than 64 rows"};
constexpr TorchRows kTorchActivated = {17, 384,
    "as measured, cuBLAS and a kernel behind it are faster for 17 to 384 rows"};
// clang-format on

}  // namespace fused_mlp::sm90
