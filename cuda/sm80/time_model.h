// How long a product takes, estimated from what a GPU says of itself.
#pragma once

#include "../gemm/gpu.h"
#include "../gemm/problem.h"
#include "plan.h"

namespace fused_mlp::sm80 {

double estimated_microseconds(const GemmProblem& problem, const ListedKernel& kernel, const Gpu& gpu);

// torch's GEMMs, and the pointwise kernel behind them where there is one.
double torch_microseconds(const GemmProblem& problem, const Gpu& gpu);

}  // namespace fused_mlp::sm80
