// A grouped product with quantised weights, for a mixture's experts. This is included in device code and in the choice
// of a kernel.
#pragma once

#include <cstdint>

#include "../../gemm/grouped.h"
#include "../problem.h"

namespace fused_mlp {

// The codes of stacked weights: e4m3 with float scales per block; or e2m1, two per byte with the first in the low half,
// and a power of two as the scale of each 32 in a row.
enum class StackCoding { kFp8, kMxfp4 };

constexpr int kMxBlock = 32;
constexpr int unit_bytes(StackCoding coding) { return coding == StackCoding::kFp8 ? kCodedBlock : kCodedBlock / 2; }

// Weights [experts, rows, k], row by row. For FP8, the values of block b of kCodedBlock elements of row r of expert e
// are to be multiplied by scales[e * scales_of_expert + r / scale_rows * scale_stride + (b >> scale_shift)], floats.
// For MXFP4 scales are bytes, [experts, rows, k / kMxBlock], exponents of two plus 127.
struct CodedStack {
  StackCoding coding;
  const uint8_t* data;
  const void* scales;
  int64_t rows;
  int64_t scales_of_expert, scale_stride;
  int scale_rows = 1, scale_shift = 0;
};

// weights, weight_rows and the fields for transposed weights of `layer` are not read. Gates and ups, and their biases,
// are concatenated, or interleaved if `interleaved`.
struct CodedExperts {
  GroupedProblem layer;
  CodedStack weight;
  bool gated;
  bool float_bias;  // biases are float; else they have the dtype of a
};

// A kernel, as listed in kernels.def: rows of an expert in a tile, warps along weight rows and along k, tiles of 16
// weight rows per warp, blocks of codes per warp in a stage, stages, maximum CTAs per multiprocessor.
struct StackKernel {
  StackCoding coding;
  bool gated;
  int tokens, warps_m, warps_k, tiles_m, steps, stages, ctas;
  bool operator==(const StackKernel&) const = default;

  constexpr int rows() const { return warps_m * tiles_m * 16; }
  constexpr int columns() const { return gated ? rows() / 2 : rows(); }
  constexpr int threads() const { return warps_m * warps_k * 32; }
  constexpr int blocks() const { return warps_k * steps; }  // blocks of codes per row in a stage
  constexpr int block_k() const { return blocks() * kCodedBlock; }

  constexpr int row_bytes() const { return blocks() * unit_bytes(coding); }
  constexpr int tokens_offset() const { return rows() * row_bytes(); }
  constexpr int stage_bytes() const { return tokens_offset() + tokens * block_k() * 2; }
  constexpr int ring_bytes() const { return stages * stage_bytes(); }
  constexpr int round() const { return tokens < 16 ? tokens : 16; }  // tokens whose sums are added at a time
  constexpr int sum_stride() const { return rows() + 4; }            // no bank conflicts when lanes write sums
  constexpr int shared_bytes() const { return ring_bytes() + warps_k * round() * sum_stride() * 4; }
};

}  // namespace fused_mlp
