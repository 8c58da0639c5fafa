#include "grouped_launch.cuh"

namespace fused_mlp::sm90 {

template cudaError_t launch_grouped<__nv_bfloat16>(const GroupedProblem&, const GroupedPlan&, int, cudaStream_t);
template cudaError_t launch_grouped_training<__nv_bfloat16>(const GroupedProblem&, const GroupedPlan&, int,
                                                            cudaStream_t);

}  // namespace fused_mlp::sm90
