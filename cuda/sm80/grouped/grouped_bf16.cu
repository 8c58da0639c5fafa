#include "grouped_launch.cuh"

namespace fused_mlp::sm80 {

template cudaError_t launch_grouped<__nv_bfloat16>(const GroupedProblem&, const GroupedPlan&, const Gpu&, cudaStream_t);

}  // namespace fused_mlp::sm80
