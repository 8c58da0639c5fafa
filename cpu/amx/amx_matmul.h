#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>

namespace fused_mlp::amx {

// Products with a smaller dimension leave most of a tile empty; torch's library was measured to be faster.
constexpr int64_t kLeastOfMatmul = 32;

// True if matmul() supports these bf16 matrices: a's rows or columns are contiguous, and b's too.
bool takes_matmul(const torch::stable::Tensor& a, const torch::stable::Tensor& b);

// out [m, n] = a [m, k] b [k, n], or += if asked. The elements of a row of `out` are adjacent.
void matmul(const torch::stable::Tensor& out, const torch::stable::Tensor& a, const torch::stable::Tensor& b,
            bool accumulate);

}  // namespace fused_mlp::amx
