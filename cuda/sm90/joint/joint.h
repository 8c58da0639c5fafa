// The kernels of gemm/joint.h.
#pragma once

#include "../../gemm/joint.h"

namespace fused_mlp::sm90 {

bool takes_joint(const JointLayers& product, const Gpu& gpu);
cudaError_t launch_joint(const JointLayers& product, const Gpu& gpu, cudaStream_t stream);

inline constexpr JointKernels kJointKernels{takes_joint, launch_joint};

}  // namespace fused_mlp::sm90
