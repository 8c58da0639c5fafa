// The outer products of experts in training: the gradients of their weights.
#pragma once

#include <cuda_runtime_api.h>

#include "../../gemm/gpu.h"
#include "../../gemm/grouped.h"

namespace fused_mlp::sm80 {

// On the current device; `p.outer` holds.
cudaError_t launch_outer(const GroupedProblem& p, const Gpu& gpu, cudaStream_t stream);

}  // namespace fused_mlp::sm80
