// A layer by torch's GEMMs, and by a pointwise kernel where these have no epilogue for its activation.
#pragma once

#include "layer.h"

namespace fused_mlp {

// Whether torch's GEMM can do the whole layer: cuBLASLt adds a bias and applies tanh-GELU in its epilogue. In float32
// the activation is left to the pointwise kernel, and where there are no input features torch does not apply it.
// cuBLASLt has ReLU too, but does not document that a NaN passes through it.
bool torch_has_epilogue(const Layer& layer);

// Computes such a layer of x [rows, in]. torch makes the result, [rows, n].
Tensor torch_activated(const Tensor& x, const Layer& layer);

// Computes any other layer of x [rows, in] into out [rows, n], whose rows follow one another.
void torch_layer(const Tensor& x, const Layer& layer, const Tensor& out);

// x weight^T + bias by torch's GEMM.
Tensor torch_linear(const TensorRows& x, const std::vector<int64_t>& out_sizes, const Tensor& weight,
                    const OptionalTensor& bias);

}  // namespace fused_mlp
