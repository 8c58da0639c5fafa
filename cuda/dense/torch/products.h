// torch's GEMMs. Where rows of an operand are no multiples of 16 bytes they take up to seven times as long: a product
// of 16 bit that is large enough is one of padded copies then.
#pragma once

#include "../../../torch-ext/torch_binding.h"

namespace fused_mlp {

constexpr int64_t kVectorOfHalves = 8;  // 16 bytes

// out [m, n] = a [m, k] b [k, n] + bias [n]. Each matrix has adjacent elements in its rows, a and b also in their
// columns instead. Copies take an eighth of a GiB, or 1,024 rows where those
// are more, and the memory of b.
void multiply(const Tensor& out, const Tensor& a, const Tensor& b, const OptionalTensor& bias = std::nullopt);

// out += a b
void multiply_and_add(const Tensor& out, const Tensor& a, const Tensor& b);

}  // namespace fused_mlp
