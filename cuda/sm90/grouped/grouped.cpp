// The grouped products of sm_90a in the table of architectures.
#include "grouped.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../../gemm/experts.h"

namespace fused_mlp::sm90 {

// Defined in grouped_bf16.cu and grouped_fp16.cu, by grouped_launch.cuh.
template <typename Element>
cudaError_t launch_grouped(const GroupedProblem& problem, const GroupedPlan& plan, int multiprocessors,
                           cudaStream_t stream);
template <typename Element>
cudaError_t launch_grouped_training(const GroupedProblem& problem, const GroupedPlan& plan, int multiprocessors,
                                    cudaStream_t stream);

namespace {

cudaError_t launch(const GroupedProblem& p, const GroupedPlan& plan, const Gpu& gpu, cudaStream_t stream) {
  return p.gemm.dtype == DType::kFloat16 ? launch_grouped<__half>(p, plan, gpu.multiprocessors, stream)
                                         : launch_grouped<__nv_bfloat16>(p, plan, gpu.multiprocessors, stream);
}

// With more rows per expert on average, no kernel for transposed weights is as fast as torch's products.
constexpr int64_t kMostTransposedRows = 32;

}  // namespace

constinit const GroupedKernels kGroupedKernels = {
    .plan = [](const GroupedProblem& p, const Gpu& gpu) { return plan_grouped(p, gpu.multiprocessors); },
    .launch = launch,
    .decide =
        [](const GroupedProblem& first, const GroupedProblem&, const Gpu&) {
          const bool many = first.routes.slots() > kMostTransposedRows * first.routes.experts;
          return first.transposed && many ? Refusal::kManyRows : Refusal::kNone;
        },
    .plan_training = [](const Routes& routes) { return plan_tiles(routes, kTiledBlock); },
    .launch_training =
        [](const GroupedProblem& p, const GroupedPlan& plan, const Gpu& gpu, cudaStream_t stream) {
          if (!p.outer && !is_training(p.gemm.kind)) return launch(p, plan, gpu, stream);
          return p.gemm.dtype == DType::kFloat16
                     ? launch_grouped_training<__half>(p, plan, gpu.multiprocessors, stream)
                     : launch_grouped_training<__nv_bfloat16>(p, plan, gpu.multiprocessors, stream);
        },
    .adds_low_rank = true,
    .fuses_in_training = true,
};

}  // namespace fused_mlp::sm90
