#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../torch-ext/matrix.h"
#include "../torch-ext/norm.h"

namespace fused_mlp {

// norm.h has what is computed of the rows of x, and of those of the residual. out may be x itself.
struct NormRows {
  Matrix x, residual, out;
  int64_t rows, cols;
  DType dtype;
  Norm norm;
};
cudaError_t launch_norm(const NormRows& rows, cudaStream_t stream);

}  // namespace fused_mlp
