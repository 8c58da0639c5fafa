#include "../launch.cuh"

namespace fused_mlp::sm90 {

template cudaError_t launch_training<__half>(const GemmProblem&, const GemmKernel&, int, cudaStream_t);

}  // namespace fused_mlp::sm90
