// The tiles of the grouped products of sm_80, and the estimate of whether they are faster than torch's.
#pragma once

#include "../../../torch-ext/ops/plan.h"
#include "../../gemm/gpu.h"
#include "../../gemm/grouped.h"

namespace fused_mlp::sm80 {

GroupedPlan plan_grouped(const GroupedProblem& problem, const Gpu& gpu);

// The times of two layers of experts, with the kernels before and after them, and of torch: a product per chosen
// expert, launched by the CPU.
double experts_microseconds(const GroupedProblem& first, const GroupedProblem& second, const Gpu& gpu);
double torch_experts_microseconds(const GroupedProblem& first, const GroupedProblem& second, const Gpu& gpu);

// kNone if our kernels are estimated to be faster by a margin.
Refusal decide_experts(const GroupedProblem& first, const GroupedProblem& second, const Gpu& gpu);

// The same for training: the plan for all of its products, and the times of a forward and its backward.
GroupedPlan plan_trained_experts(const Routes& routes);
double trained_experts_microseconds(const GroupedProblem& first, const GroupedProblem& second, const Gpu& gpu);
double torch_trained_experts_microseconds(const GroupedProblem& first, const GroupedProblem& second, const Gpu& gpu);
Refusal decide_trained_experts(const GroupedProblem& first, const GroupedProblem& second, const Gpu& gpu);

// True if they take less time than those of sm_90a on a GPU of that architecture (beside_sm90.cpp).
bool experts_are_faster_beside_sm90(const GroupedProblem& first, const Gpu& gpu);

}  // namespace fused_mlp::sm80
