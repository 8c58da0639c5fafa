#include "launch.cuh"

namespace fused_mlp::sm80 {

template cudaError_t launch<__half>(const GemmProblem&, const GemmKernel&, cudaStream_t);

}  // namespace fused_mlp::sm80
