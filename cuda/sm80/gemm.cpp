// The row of sm_80 and later in the table of architectures: A100, A10, L4, L40S, RTX 3090 to 5090 and their like.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../gemm/architecture.h"
#include "../gemm/choice/refusal.h"
#include "grouped/grouped_plan.h"
#include "grouped/outer.h"
#include "plan/plan.h"
#include "plan/time_model.h"

namespace fused_mlp::sm80 {

// Defined in gemm_bf16.cu: whether there is machine code for the GPUs of a compute capability.
bool compiled_for(int major, int minor);

// Defined by launch.cuh: in gemm_bf16.cu and gemm_fp16.cu, and those of training in training_bf16.cu and
// training_fp16.cu.
template <typename Element, bool kTraining>
cudaError_t launch(const GemmProblem& problem, const GemmKernel& kernel, const Gpu& gpu, cudaStream_t stream);

template <typename Element>
cudaError_t launch(const GemmProblem& p, const GemmKernel& kernel, const Gpu& gpu, cudaStream_t stream) {
  return is_training(kernel.product) ? launch<Element, true>(p, kernel, gpu, stream)
                                     : launch<Element, false>(p, kernel, gpu, stream);
}

// Defined by grouped_launch.cuh: in grouped_bf16.cu and grouped_fp16.cu.
template <typename Element>
cudaError_t launch_grouped(const GroupedProblem& problem, const GroupedPlan& plan, const Gpu& gpu, cudaStream_t stream);

cudaError_t launch_experts(const GroupedProblem& p, const GroupedPlan& plan, const Gpu& gpu, cudaStream_t stream) {
  return p.gemm.dtype == DType::kFloat16 ? launch_grouped<__half>(p, plan, gpu, stream)
                                         : launch_grouped<__nv_bfloat16>(p, plan, gpu, stream);
}

constinit const GroupedKernels kGroupedKernels = {
    .plan = plan_grouped,
    .launch = launch_experts,
    .decide = decide_experts,
    .plan_training = plan_trained_experts,
    .decide_training = decide_trained_experts,
    .launch_training =
        [](const GroupedProblem& p, const GroupedPlan& plan, const Gpu& gpu, cudaStream_t stream) {
          if (p.outer) return launch_outer(p, gpu, stream);
          GroupedProblem plain = p;  // weights [k, n] are those of any product here
          plain.gemm.kind = Product::kPlain;
          plain.gemm.epilogue.activation = static_cast<int64_t>(Activation::kLinear);
          return launch_experts(plain, plan, gpu, stream);
        },
    .are_faster_beside = experts_are_faster_beside_sm90,
};

constinit const Architecture kArchitecture = {
    .name = "sm80",
    .runs_on =
        [](const Gpu& gpu) {
          const bool known = gpu.major == 8 || (gpu.major == 9 && gpu.minor == 0) || gpu.major == 12;
          return known && compiled_for(gpu.major, gpu.minor);
        },
    .kernels = kKernels,
    .refusal =
        [](const GemmProblem& p) {
          if (p.low_rank) return Refusal::kLowRank;
          return p.pair() && p.terms() != 2 ? Refusal::kTorchIsFaster : refusal_of_operands(p);
        },
    .choose = choose,
    .launch =
        [](const GemmProblem& p, const GemmPlan& plan, const Gpu& gpu, cudaStream_t stream) {
          return p.dtype == DType::kFloat16 ? launch<__half>(p, plan.kernel, gpu, stream)
                                            : launch<__nv_bfloat16>(p, plan.kernel, gpu, stream);
        },
    .torch_microseconds = nullptr,
    .peak = nullptr,
    .decide = decide,
    .measured = [](const Gpu& gpu) { return tuning_of(gpu).measured(); },
    .choose_beside = choose_beside_sm90,
    .rank_rows_ctas = nullptr,
    .launch_rank_rows = nullptr,
    .dropped = nullptr,
    .grouped = &kGroupedKernels,
};

}  // namespace fused_mlp::sm80
