#include "../launch.cuh"

namespace fused_mlp::sm80 {

template cudaError_t launch<__nv_bfloat16, true>(const GemmProblem&, const GemmKernel&, const Gpu&, cudaStream_t);

}  // namespace fused_mlp::sm80
