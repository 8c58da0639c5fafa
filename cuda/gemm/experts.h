// The architecture that has kernels for the experts of a mixture.
#pragma once

#include <cuda_runtime_api.h>

#include "grouped.h"

namespace fused_mlp::sm90 {

GroupedPlan plan_grouped(const GroupedProblem& problem, int multiprocessors);

// Sorting where `sort` is not null, both layers, and the sum: one launch each, on the current device.
cudaError_t launch_experts(const RowSort* sort, const GroupedProblem& first, const GroupedProblem& second,
                           const WeightedSum& sum, int multiprocessors, cudaStream_t stream);

}  // namespace fused_mlp::sm90
