#pragma once

#include <torch/csrc/stable/tensor.h>

#include "amx_gemm.h"

namespace fused_mlp::amx {

// Computes the layer, or with `down` both layers, for bf16 tokens x, whose rows are x_stride elements apart. The result
// goes to the dense matrix `out`, and the hidden layer's values before the activation to `kept`.
void run(const torch::stable::Tensor& x, int64_t x_stride, int64_t tokens, const Layer& hidden, const Layer* down,
         const torch::stable::Tensor& out, const Kept& kept);

}  // namespace fused_mlp::amx
