// The row of sm_90a (H100, H200) in the table of architectures.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../gemm/architecture.h"
#include "../gemm/choice/refusal.h"
#include "grouped/grouped.h"
#include "low_rank/dropped.h"
#include "low_rank/rank_rows.h"
#include "plan/plan.h"
#include "plan/tuning.h"

namespace fused_mlp::sm90 {

// Defined in gemm_bf16.cu and gemm_fp16.cu, by launch.cuh.
template <typename Element>
cudaError_t launch(const GemmProblem& problem, const GemmKernel& kernel, int multiprocessors, cudaStream_t stream);
// Likewise in training_bf16.cu and training_fp16.cu.
template <typename Element>
cudaError_t launch_training(const GemmProblem& problem, const GemmKernel& kernel, int multiprocessors,
                            cudaStream_t stream);

template <typename Element>
cudaError_t launch_any(const GemmProblem& p, const GemmKernel& kernel, int multiprocessors, cudaStream_t stream) {
  return is_training(kernel.product) ? launch_training<Element>(p, kernel, multiprocessors, stream)
                                     : launch<Element>(p, kernel, multiprocessors, stream);
}

// The constants were measured on one GPU of the architecture. What limits a kernel is its clock or the bandwidth of the
// memory, and another one differs in these.
Chip chip(const Gpu& gpu) {
  const auto ratio = [](double here, double measured) {
    return here > 0.0 ? here / measured : 1.0;  // a driver that does not know says 0
  };
  const double bandwidth = ratio(gpu.bytes_per_microsecond, kMeasuredOn.bytes_per_microsecond);
  return {gpu.multiprocessors, kPeak.bytes_per_microsecond * bandwidth,
          ratio(gpu.cycles_per_microsecond, kMeasuredOn.cycles_per_microsecond)};
}

constinit const Architecture kArchitecture = {
    .name = "sm90",
    .runs_on = [](const Gpu& gpu) { return gpu.major == 9 && gpu.minor == 0; },
    .kernels = kKernels,
    .refusal = [](const GemmProblem& p) { return takes_factor(p) ? refusal_of_operands(p) : Refusal::kLowRank; },
    .choose = [](const GemmProblem& p, const Gpu& gpu) { return choose(p, chip(gpu)); },
    .launch =
        [](const GemmProblem& p, const GemmPlan& plan, const Gpu& gpu, cudaStream_t stream) {
          return p.dtype == DType::kFloat16 ? launch_any<__half>(p, plan.kernel, gpu.multiprocessors, stream)
                                            : launch_any<__nv_bfloat16>(p, plan.kernel, gpu.multiprocessors, stream);
        },
    .torch_microseconds = [](const GemmProblem& p, const Gpu& gpu) { return torch_microseconds(p, kTorch, chip(gpu)); },
    .peak =
        [](const Gpu& gpu) {
          const Chip here = chip(gpu);
          const double tensor_cores = here.clock * gpu.multiprocessors / kMeasuredOn.multiprocessors;
          return Peak{here.bytes_per_microsecond, kPeak.flops_per_microsecond * tensor_cores};
        },
    .decide = nullptr,
    .measured = nullptr,
    .choose_beside = nullptr,
    .rank_rows_ctas = rank_rows_ctas,
    .launch_rank_rows = launch_rank_rows,
    .dropped = &kDroppedKernels,
    .grouped = &kGroupedKernels,
};

}  // namespace fused_mlp::sm90
