#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../torch-ext/matrix.h"

namespace fused_mlp {

// LayerNorm over the columns of x + residual; of x alone where residual.data is null. A null weight stands for ones, a
// null bias for zeros. out may be x itself.
struct LayerNorm {
  Matrix x, residual, out;
  int64_t rows, cols;
  DType dtype;
  const void *weight, *bias;
  float eps;
};
cudaError_t launch_layer_norm(const LayerNorm& norm, cudaStream_t stream);

}  // namespace fused_mlp
