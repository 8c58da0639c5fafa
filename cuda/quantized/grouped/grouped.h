// The grouped kernels for quantised weights, the division of a product into their tiles, and the kernel that decodes
// weights.
#pragma once

#include <cuda_runtime_api.h>

#include "../../gemm/gpu.h"
#include "problem.h"

namespace fused_mlp {

GroupedPlan plan_stack(const Routes& routes);

// For bfloat16 rows. Launches on the current device.
cudaError_t launch_stack(const CodedExperts& problem, const GroupedPlan& plan, const Gpu& gpu, cudaStream_t stream);

// The same for MXFP4 with more rows, on Hopper: rows are sorted.
GroupedPlan plan_fitted_stack(const Routes& routes);
cudaError_t launch_fitted_stack(const CodedExperts& problem, const GroupedPlan& plan, const Gpu& gpu,
                                cudaStream_t stream);

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
