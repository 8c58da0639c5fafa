#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../torch-ext/matrix.h"

namespace fused_mlp {

// LayerNorm, or RMSNorm where not centred, over the columns of x + residual; of x alone where residual.data is null. A
// null weight stands for ones, a null bias for zeros. out may be x itself.
struct Norm {
  Matrix x, residual, out;
  int64_t rows, cols;
  DType dtype;
  const void *weight, *bias;
  float eps;
  float weight_offset;  // which each weight is stored without
  bool centred;
};
cudaError_t launch_norm(const Norm& norm, cudaStream_t stream);

}  // namespace fused_mlp
