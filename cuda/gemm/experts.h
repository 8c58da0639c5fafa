// The architecture that has kernels for the experts of a mixture.
#pragma once

#include <cuda_runtime_api.h>

#include "grouped.h"

namespace fused_mlp::sm90 {

GroupedPlan plan_grouped(const GroupedProblem& problem, int multiprocessors);

// Sorting where `sort` is not null, both layers, and the sum: one launch each, on the current device.
cudaError_t launch_experts(const RowSort* sort, const GroupedProblem& first, const GroupedProblem& second,
                           const WeightedSum& sum, int multiprocessors, cudaStream_t stream);

// The steps of training, likewise. Products are those of a plan for many tokens, whose rows are sorted into blocks.
GroupedPlan plan_tiles(const Routes& routes, int block_rows = kTiledBlock);
cudaError_t launch_row_sort(const RowSort& sort, int multiprocessors, cudaStream_t stream);
cudaError_t launch_product(const GroupedProblem& problem, int multiprocessors, cudaStream_t stream);
cudaError_t launch_sum(const WeightedSum& sum, cudaStream_t stream);
cudaError_t launch_weight_gradient(const WeightGradient& gradient, cudaStream_t stream);

}  // namespace fused_mlp::sm90
