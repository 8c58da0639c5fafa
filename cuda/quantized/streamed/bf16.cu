#include "launch.cuh"

namespace fused_mlp {

cudaError_t launch_coded_bf16(const CodedProblem& problem, const CodedPlan& plan, const Gpu& gpu, cudaStream_t stream) {
  return launch_coded_of<__nv_bfloat16>(problem, plan, gpu, stream);
}

}  // namespace fused_mlp
