// The grouped kernels of quantised weights, and how a product is cut into their tiles.
#pragma once

#include <cuda_runtime_api.h>

#include "../../gemm/gpu.h"
#include "problem.h"

namespace fused_mlp {

// Up to so many usual rows of an expert the kernels are taken; before products of more rows weights are decoded.
constexpr int64_t kMostStackRows = 64;

GroupedPlan plan_stack(const Routes& routes);

// For rows in bfloat16. Launches on the current device.
cudaError_t launch_stack(const CodedExperts& problem, const GroupedPlan& plan, const Gpu& gpu, cudaStream_t stream);

}  // namespace fused_mlp
