// A layer by torch's GEMMs, and by a pointwise kernel if they have no epilogue for its activation.
#pragma once

#include "../layer.h"

namespace fused_mlp {

// True if torch's GEMM can compute the whole layer: cuBLASLt adds a bias and applies tanh-GELU in its epilogue. In
// float32 the pointwise kernel applies the activation, and without input features torch does not apply it at all. If
// rows are not whole vectors of 16 bytes, cuBLASLt's kernel with that epilogue takes up to 3.5 times as long as the one
// without (measured on an H200). cuBLASLt has ReLU too, but does not document that a NaN passes through it.
bool torch_has_epilogue(const Matrix& x, const Layer& layer);

// Computes a layer of x [rows, in]: [rows, n].
Tensor torch_layer(const Tensor& x, const Layer& layer);

// The same into `out`, whose rows are adjacent, for a layer without such an epilogue: torch's GEMM with the epilogue
// cannot write into a given tensor.
void torch_layer_into(const Tensor& out, const Tensor& x, const Layer& layer);

// x weight^T + bias by torch's GEMM.
Tensor torch_linear(const TensorRows& x, const std::vector<int64_t>& out_sizes, const Tensor& weight,
                    const OptionalTensor& bias);

}  // namespace fused_mlp
