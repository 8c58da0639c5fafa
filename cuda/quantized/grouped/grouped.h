// The grouped kernels for quantised weights, and the division of a product into their tiles.
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

}  // namespace fused_mlp
