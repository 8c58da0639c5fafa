// A product with weights of 4-bit codes. This is included in device code, and in the choice of a kernel.
#pragma once

#include <cstdint>

#include "../gemm/problem.h"

namespace fused_mlp {

// A weight [n, k] in blocks of k that share a scale. Element i, counted through the rows, is the high half of byte
// i / 2 where i is even, and else the low one; it stands for code[that] * scales[i / block].
struct CodedWeight {
  const uint8_t* data = nullptr;
  const float* scales = nullptr;
  const float* code = nullptr;  // [16]
};

// out = act(a weight^T + bias), times (a up_weight^T + up_bias) where up_weight.data is not null. Both weights have the
// code of the first, and blocks of kCodedBlock.
struct CodedProblem {
  Matrix a;
  CodedWeight weight, up_weight;
  Matrix out;
  int64_t m, n, k;
  DType dtype;
  EpilogueArgs epilogue;
  bool starts_early;  // before the kernel that writes a is done, which did not write the weights

  bool gated() const { return up_weight.data != nullptr; }
};

constexpr int kCodedBlock = 64;

// A kernel, as kernels.def lists it.
struct CodedKernel {
  int tokens, warps_m, warps_k, tiles_m, steps, stages, ctas;
  bool operator==(const CodedKernel&) const = default;

  constexpr int rows() const { return warps_m * tiles_m * 16; }
  constexpr int columns(bool gated) const { return gated ? rows() / 2 : rows(); }
  constexpr int threads() const { return warps_m * warps_k * 32; }
  constexpr int blocks() const { return warps_k * steps; }  // of codes, of a row in a stage
  constexpr int block_k() const { return blocks() * kCodedBlock; }

  static constexpr int kTableBytes = 256 * 32 * 4;
  constexpr int scales_offset() const { return rows() * block_k() / 2; }
  constexpr int tokens_offset() const { return scales_offset() + rows() * blocks() * 4; }
  constexpr int stage_bytes() const { return tokens_offset() + tokens * block_k() * 2; }
  constexpr int ring_bytes() const { return stages * stage_bytes(); }
  constexpr int sum_stride() const { return rows() + 4; }  // no two lanes meet a bank when they write sums
  constexpr int part_bytes() const { return tokens * sum_stride() * 4; }
  constexpr int shared_bytes() const { return kTableBytes + ring_bytes() + warps_k * part_bytes(); }
};

}  // namespace fused_mlp
