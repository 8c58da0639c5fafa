#include "../launch.cuh"

namespace fused_mlp::sm90 {

template cudaError_t launch<__nv_bfloat16>(const GemmProblem&, const GemmKernel&, int, cudaStream_t);

}  // namespace fused_mlp::sm90
