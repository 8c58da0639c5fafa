#pragma once

#include <torch/csrc/stable/tensor.h>

#include "amx_gemm.h"

namespace fused_mlp::amx {

// The layer's output, or with `down` that of both layers, for bf16 tokens x (rows x_stride elements apart) into the
// dense matrix `out`.
void run(const torch::stable::Tensor& x, int64_t x_stride, int64_t tokens, const Layer& hidden, const Layer* down,
         const torch::stable::Tensor& out);

}  // namespace fused_mlp::amx
