#pragma once

#include <cuda_runtime_api.h>

#include "../../torch-ext/ops/attention/rotary.h"

namespace fused_mlp {

cudaError_t launch_rotary(const Rotary& rotary, cudaStream_t stream);

}  // namespace fused_mlp
