// The launches of the experts of a mixture.
#include "../gemm/experts.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace fused_mlp::sm90 {

// Defined in grouped_bf16.cu and grouped_fp16.cu, by grouped_launch.cuh.
template <typename Element>
cudaError_t launch_grouped(const GroupedProblem& problem, const GroupedPlan& plan, int multiprocessors,
                           cudaStream_t stream);
template <typename Element>
cudaError_t launch_grouped_training(const GroupedProblem& problem, const GroupedPlan& plan, int multiprocessors,
                                    cudaStream_t stream);
template <typename Element>
cudaError_t launch_weighted_sum(const WeightedSum& sum, cudaStream_t stream);

namespace {

template <typename Element>
cudaError_t launch(const GroupedProblem& first, const GroupedProblem& second, const WeightedSum& sum,
                   int multiprocessors, cudaStream_t stream) {
  if (sum.routes.slots() > 0) {
    for (const GroupedProblem* problem : {&first, &second}) {
      const GroupedPlan plan = plan_grouped(*problem, multiprocessors);
      const cudaError_t error = launch_grouped<Element>(*problem, plan, multiprocessors, stream);
      if (error != cudaSuccess) return error;
    }
  }
  return launch_weighted_sum<Element>(sum, stream);
}

}  // namespace

cudaError_t launch_experts(const RowSort* sort, const GroupedProblem& first, const GroupedProblem& second,
                           const WeightedSum& sum, int multiprocessors, cudaStream_t stream) {
  const cudaError_t error = sort == nullptr ? cudaSuccess : launch_row_sort(*sort, multiprocessors, stream);
  if (error != cudaSuccess) return error;
  return sum.dtype == DType::kFloat16 ? launch<__half>(first, second, sum, multiprocessors, stream)
                                      : launch<__nv_bfloat16>(first, second, sum, multiprocessors, stream);
}

cudaError_t launch_product(const GroupedProblem& problem, int multiprocessors, cudaStream_t stream) {
  const GroupedPlan plan = plan_tiles(problem.routes);
  const bool trains = problem.outer || is_training(problem.gemm.kind);
  if (problem.gemm.dtype == DType::kFloat16) {
    return trains ? launch_grouped_training<__half>(problem, plan, multiprocessors, stream)
                  : launch_grouped<__half>(problem, plan, multiprocessors, stream);
  }
  return trains ? launch_grouped_training<__nv_bfloat16>(problem, plan, multiprocessors, stream)
                : launch_grouped<__nv_bfloat16>(problem, plan, multiprocessors, stream);
}

cudaError_t launch_sum(const WeightedSum& sum, cudaStream_t stream) {
  return sum.dtype == DType::kFloat16 ? launch_weighted_sum<__half>(sum, stream)
                                      : launch_weighted_sum<__nv_bfloat16>(sum, stream);
}

}  // namespace fused_mlp::sm90
