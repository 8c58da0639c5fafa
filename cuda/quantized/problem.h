// A product with quantised weights. This is included in device code, and in the choice of a kernel.
#pragma once

#include <cstdint>

#include "../../torch-ext/operands/packed.h"
#include "../../torch-ext/operands/zero_point.h"
#include "../gemm/problem.h"

namespace fused_mlp {

constexpr int kCodedBlock = 64;  // elements of k that streamed kernels take at a time
constexpr int kCodedRun = 4;  // blocks that they ask for at a time
constexpr int kTableEntryBytes = 256;  // of the table of pairs: those of 32 lanes, half of it is not used
constexpr int tiled_block_k(Coding coding) { return in_bytes(coding) ? 2 * kCodedBlock : kCodedBlock; }
constexpr int block_bytes(Coding coding) { return in_bytes(coding) ? kCodedBlock : kCodedBlock / 2; }

// A weight [n, k], row by row. The values of block b of kCodedBlock elements of row r are to be multiplied by
// scales[r / scale_rows * scale_stride + (b >> scale_shift)] * factor, the factor being 1 but for those in bytes.
struct CodedWeight {
  const uint8_t* data = nullptr;
  const float* code = nullptr;  // [16], of kFourBits
  const float* scales = nullptr;
  int64_t scale_stride = 0;
  int scale_rows = 1, scale_shift = 0;
  float factor = 1.0f;
};

// out = act(a weight^T + bias), times (a up_weight^T + up_bias) where up_weight.data is not null. Both weights have the
// code of the first, and the same rows, shift and factor of scales.
struct CodedProblem {
  Coding coding;
  Matrix a;
  CodedWeight weight, up_weight;
  Matrix out;
  int64_t m, n, k;
  DType dtype;
  EpilogueArgs epilogue;
  bool starts_early;  // before the kernel that writes a is done, which did not write the weights

  bool gated() const { return up_weight.data != nullptr; }
};

// A streamed kernel, as kernels.def lists it.
struct CodedKernel {
  Coding coding;
  int tokens, tiles_m, ahead, warps;
  bool operator==(const CodedKernel&) const = default;

  constexpr int columns(bool gated) const { return gated ? tiles_m * 8 : tiles_m * 16; }  // of a warp
  constexpr int table_bytes() const { return coding == Coding::kFourBits ? 256 * kTableEntryBytes : 0; }
};

// How a CTA of a streamed kernel is cut at the launch: so many warps have other weight rows, and so many share k. Rows
// of a come in `stages` parts of k, each of `steps` runs of kCodedRun blocks of every warp.
struct CodedShape {
  int warps_m, warps_k, split, steps;

  constexpr int threads() const { return warps_m * warps_k * 32; }
  constexpr int row_bytes() const { return steps * warps_k * kCodedRun * kCodedBlock * 2; }  // of a in a stage
};

}  // namespace fused_mlp
