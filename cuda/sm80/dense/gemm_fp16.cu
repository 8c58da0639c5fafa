#include "../launch.cuh"

namespace fused_mlp::sm80 {

template cudaError_t launch<__half, false>(const GemmProblem&, const GemmKernel&, const Gpu&, cudaStream_t);

}  // namespace fused_mlp::sm80
