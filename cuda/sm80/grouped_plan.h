// The grouped products of sm_80, and when they are estimated to be faster than torch's.
#pragma once

#include "../gemm/experts.h"

namespace fused_mlp::sm80 {

extern const GroupedKernels kGroupedKernels;

// What two layers of experts take, with what stands before and behind them, and what torch's way takes: a product of
// each expert that is chosen, launched by the CPU.
double experts_microseconds(const GroupedProblem& first, const GroupedProblem& second, const Gpu& gpu);
double torch_experts_microseconds(const GroupedProblem& first, const GroupedProblem& second, const Gpu& gpu);

}  // namespace fused_mlp::sm80
