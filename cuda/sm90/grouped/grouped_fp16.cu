#include "grouped_launch.cuh"

namespace fused_mlp::sm90 {

template cudaError_t launch_grouped<__half>(const GroupedProblem&, const GroupedPlan&, int, cudaStream_t);
template cudaError_t launch_grouped_training<__half>(const GroupedProblem&, const GroupedPlan&, int, cudaStream_t);

}  // namespace fused_mlp::sm90
