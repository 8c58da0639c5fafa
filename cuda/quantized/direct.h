#pragma once

#include <functional>

#include "../../torch-ext/calls/direct/plain.h"
#include "../gemm/gpu.h"

namespace fused_mlp {

// plan_direct() for an MLP with quantised weights, on the current device.
std::function<void(void* out)> plan_quantized_direct(const PlainMlp& mlp, const Gpu& gpu);

}  // namespace fused_mlp
