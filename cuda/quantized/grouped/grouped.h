// The grouped kernels of quantised weights, and how a product is cut into their tiles.
#pragma once

#include <cuda_runtime_api.h>

#include "../../gemm/gpu.h"
#include "problem.h"

namespace fused_mlp {

GroupedPlan plan_stack(const Routes& routes);

// For rows in bfloat16. Launches on the current device.
cudaError_t launch_stack(const CodedExperts& problem, const GroupedPlan& plan, const Gpu& gpu, cudaStream_t stream);

// The same of MXFP4 with more rows, on Hopper: rows are sorted.
GroupedPlan plan_fitted_stack(const Routes& routes);
cudaError_t launch_fitted_stack(const CodedExperts& problem, const GroupedPlan& plan, const Gpu& gpu,
                                cudaStream_t stream);

}  // namespace fused_mlp
