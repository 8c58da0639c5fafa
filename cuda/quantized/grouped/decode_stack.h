// The kernel that decodes the weights of experts.
#pragma once

#include <cuda_runtime_api.h>

#include "problem.h"

namespace fused_mlp {

// Weights [experts, rows, k] with block scales, [experts, ceil(rows / block_rows), ceil(k / block)]. For MXFP4 k is a
// multiple of a block, and block_rows is 1.
struct StackElements {
  StackCoding coding;
  const uint8_t* data;
  const void* scales;
  int64_t experts, rows, k, block_rows, block;
};

// Writes all elements, each value times its scale, rounded to the dtype.
cudaError_t launch_decode(const StackElements& weight, void* out, DType dtype, cudaStream_t stream);

}  // namespace fused_mlp
