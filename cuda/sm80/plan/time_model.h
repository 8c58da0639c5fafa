// The time of a product, estimated from the properties that a GPU reports.
#pragma once

#include "../../gemm/gpu.h"
#include "../../gemm/problem.h"
#include "plan.h"
#include "tuning.h"

namespace fused_mlp::sm80 {

// Measured on GPUs of the same compute capability, or else estimated for all.
const Tuning& tuning_of(const Gpu& gpu);

// The peak operations per microsecond of one multiprocessor's tensor cores.
double flops_per_microsecond(const Gpu& gpu);

double estimated_microseconds(const GemmProblem& problem, const ListedKernel& kernel, const Gpu& gpu);

// torch's GEMMs, and the pointwise kernel after them if there is one.
double torch_microseconds(const GemmProblem& problem, const Gpu& gpu);

}  // namespace fused_mlp::sm80
