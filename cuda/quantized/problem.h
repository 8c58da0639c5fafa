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

}  // namespace fused_mlp
