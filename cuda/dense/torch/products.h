// torch's GEMMs. If rows of an operand are not multiples of 16 bytes, they take up to seven times as long; a 16-bit
// product that is large enough then runs on padded copies.
#pragma once

#include "../../../torch-ext/torch_binding.h"

namespace fused_mlp {

constexpr int64_t kVectorOfHalves = 8;  // 16 bytes

// out [m, n] = a [m, k] b [k, n] + bias [n]. Each matrix has contiguous rows, or a and b contiguous columns instead.
// Copies take an eighth of a GiB, or 1,024 rows if those are more, plus the memory of b.
void multiply(const Tensor& out, const Tensor& a, const Tensor& b, const OptionalTensor& bias = std::nullopt);

// out += a b
void multiply_and_add(const Tensor& out, const Tensor& a, const Tensor& b);

}  // namespace fused_mlp
