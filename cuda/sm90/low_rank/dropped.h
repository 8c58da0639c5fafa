// The kernels of gemm/dropped.h.
#pragma once

#include "../../gemm/dropped.h"

namespace fused_mlp::sm90 {

cudaError_t launch_dropped_rows(const DroppedRows& product, cudaStream_t stream);
cudaError_t launch_masked_sum(const MaskedSum& sum, int multiprocessors, cudaStream_t stream);
cudaError_t launch_outer_factor(const OuterFactor& product, int multiprocessors, cudaStream_t stream);

inline constexpr DroppedKernels kDroppedKernels{launch_dropped_rows, launch_masked_sum, launch_outer_factor};

}  // namespace fused_mlp::sm90
