#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>

namespace fused_mlp::amx {

// Products with less of any dimension leave most of a tile empty, and torch's library was measured to be faster.
constexpr int64_t kLeastOfMatmul = 32;

// True if matmul() takes these bf16 matrices: the elements of a's rows or columns are adjacent, and of b's.
bool takes_matmul(const torch::stable::Tensor& a, const torch::stable::Tensor& b);

// out [m, n] = a [m, k] b [k, n], added to what `out` holds if asked. The elements of a row of `out` are adjacent.
void matmul(const torch::stable::Tensor& out, const torch::stable::Tensor& a, const torch::stable::Tensor& b,
            bool accumulate);

}  // namespace fused_mlp::amx
