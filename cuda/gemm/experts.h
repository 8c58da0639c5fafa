// The experts of a mixture: the kernels that compute their products, and the kernels before and after these.
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
  // kNone if our kernels should compute the two layers of a call; otherwise the reason why torch should.
  Refusal (*decide)(const GroupedProblem& first, const GroupedProblem& second, const Gpu& gpu);
  // The products of training, and the plan for their rows, sorted into blocks. Null if there are none.
  GroupedPlan (*plan_training)(const Routes& routes);
  // Like decide(), for a forward and its backward. Null if our kernels always compute them.
  Refusal (*decide_training)(const GroupedProblem& first, const GroupedProblem& second, const Gpu& gpu) = nullptr;
  cudaError_t (*launch_training)(const GroupedProblem& problem, const GroupedPlan& plan, const Gpu& gpu,
                                 cudaStream_t stream);
  // True if these kernels take less time for both layers of a call than those of another architecture, which is the
  // GPU's own. Null if they never do.
  bool (*are_faster_beside)(const GroupedProblem& first, const Gpu& gpu) = nullptr;
  bool adds_low_rank = false;      // true if products add a low-rank term
  bool fuses_in_training = false;  // true if products of training also have epilogues of gates
};

// True if a kernel may start while the one before it drains; older GPUs do not have the instructions for it.
constexpr bool starts_kernels_early(const Gpu& gpu) { return gpu.major >= 9; }

// One launch each, on the current device. The sum starts early.
cudaError_t launch_row_sort(const RowSort& sort, const Gpu& gpu, cudaStream_t stream);
cudaError_t launch_sum(const WeightedSum& sum, const Gpu& gpu, cudaStream_t stream);
cudaError_t launch_weight_gradient(const WeightGradient& gradient, const Gpu& gpu, cudaStream_t stream);

}  // namespace fused_mlp
