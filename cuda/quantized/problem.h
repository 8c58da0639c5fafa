// A product with quantised weights. This is included in device code and in the choice of a kernel.
#pragma once

#include <cstdint>

#include "../../torch-ext/operands/packed.h"
#include "../../torch-ext/operands/zero_point.h"
#include "../gemm/problem.h"

namespace fused_mlp {

constexpr int kCodedBlock = 64;  // elements of k that streamed kernels process at a time
constexpr int tiled_block_k(Coding coding) { return in_bytes(coding) ? 2 * kCodedBlock : kCodedBlock; }
constexpr int block_bytes(Coding coding) { return in_bytes(coding) ? kCodedBlock : kCodedBlock / 2; }

// A weight [n, k], row by row. The values of block b of kCodedBlock elements of row r are to be multiplied by scales[r
// / scale_rows * scale_stride + (b >> scale_shift)] * factor; the factor is 1 except for one-byte values. For
// kInt4Tiles scales are pairs of bfloat16, scale and zero, which row r has at scales[(b >> scale_shift) * scale_stride
// + r], and a tile's rows have `columns` codes each.
struct CodedWeight {
  const uint8_t* data = nullptr;
  const float* code = nullptr;  // [16], for kFourBits
  const float* scales = nullptr;
  int64_t scale_stride = 0;
  int scale_rows = 1, scale_shift = 0;
  float factor = 1.0f;
  int64_t columns = 0;
};

// out = act(a weight^T + bias), times (a up_weight^T + up_bias) if up_weight.data is not null. Both weights have the
// code of the first, and the same rows, shift and factor of scales.
struct CodedProblem {
  Coding coding;
  Matrix a;
  CodedWeight weight, up_weight;
  Matrix out;
  int64_t m, n, k;
  DType dtype;
  EpilogueArgs epilogue;
  bool starts_early;  // before the kernel that writes a, but not the weights, is done

  bool gated() const { return up_weight.data != nullptr; }
};

// A streamed kernel, as listed in kernels.def.
struct CodedKernel {
  Coding coding;
  int tokens, warps_m, warps_k, tiles_m, steps, stages, ctas;
  bool operator==(const CodedKernel&) const = default;

  constexpr int rows() const { return warps_m * tiles_m * 16; }
  constexpr int columns(bool gated) const { return gated ? rows() / 2 : rows(); }
  constexpr int threads() const { return warps_m * warps_k * 32; }
  constexpr int blocks() const { return warps_k * steps; }  // blocks of codes per row in a stage
  constexpr int block_k() const { return blocks() * kCodedBlock; }

  constexpr int table_bytes() const { return coding == Coding::kFourBits ? 256 * 32 * 4 : 0; }
  constexpr int scales_offset() const { return rows() * blocks() * block_bytes(coding); }
  constexpr int tokens_offset() const { return scales_offset() + rows() * blocks() * 4; }
  constexpr int stage_bytes() const { return tokens_offset() + tokens * block_k() * 2; }
  constexpr int ring_bytes() const { return stages * stage_bytes(); }
  constexpr int sum_stride() const { return rows() + 4; }  // no bank conflicts when lanes write sums
  constexpr int part_bytes() const { return tokens * sum_stride() * 4; }
  constexpr int shared_bytes() const { return table_bytes() + ring_bytes() + warps_k * part_bytes(); }
};

}  // namespace fused_mlp
