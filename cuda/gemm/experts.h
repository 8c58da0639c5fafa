// The experts of a mixture: which kernels compute their products, and what stands before and behind these.
#pragma once

#include <cuda_runtime_api.h>

#include "../../torch-ext/ops/plan.h"
#include "gpu.h"
#include "grouped.h"

namespace fused_mlp {

// The kernels of an architecture.
struct GroupedKernels {
  // Both layers of a call have plans for the same rows.
  GroupedPlan (*plan)(const GroupedProblem& problem, const Gpu& gpu);
  // Launches on the current device.
  cudaError_t (*launch)(const GroupedProblem& problem, const GroupedPlan& plan, const Gpu& gpu, cudaStream_t stream);
  // kNone where the two layers of a call are to be ours; otherwise the reason why they are torch's.
  Refusal (*decide)(const GroupedProblem& first, const GroupedProblem& second, const Gpu& gpu);
  // The products of training, and the plan for their rows, sorted into blocks. Null where there are none.
  GroupedPlan (*plan_training)(const Routes& routes);
  // As decide(), of a forward and its backward. Null where they are always ours.
  Refusal (*decide_training)(const GroupedProblem& first, const GroupedProblem& second, const Gpu& gpu) = nullptr;
  cudaError_t (*launch_training)(const GroupedProblem& problem, const GroupedPlan& plan, const Gpu& gpu,
                                 cudaStream_t stream);
  // True if they take less time for both layers of a call than those of another architecture, which is the GPU's own.
  // Null where they never do.
  bool (*are_faster_beside)(const GroupedProblem& first, const Gpu& gpu) = nullptr;
  bool adds_low_rank = false;      // true if products add a low-rank term
  bool fuses_in_training = false;  // true if products of training have epilogues of gates, and not plain ones alone
};

// True if a kernel may start while the one before it drains: before, the instructions for it are not there.
constexpr bool starts_kernels_early(const Gpu& gpu) { return gpu.major >= 9; }

// One launch each, on the current device. The sum starts early.
cudaError_t launch_row_sort(const RowSort& sort, const Gpu& gpu, cudaStream_t stream);
cudaError_t launch_sum(const WeightedSum& sum, const Gpu& gpu, cudaStream_t stream);
cudaError_t launch_weight_gradient(const WeightGradient& gradient, const Gpu& gpu, cudaStream_t stream);

}  // namespace fused_mlp
