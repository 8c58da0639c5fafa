#include "launch.cuh"

namespace fused_mlp {

cudaError_t launch_coded_fp16(const CodedProblem& problem, const CodedPlan& plan, const Gpu& gpu, cudaStream_t stream) {
  return launch_coded_of<__half>(problem, plan, gpu, stream);
}

}  // namespace fused_mlp
