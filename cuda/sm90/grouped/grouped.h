// The tiles of the grouped products of sm_90a.
#pragma once

#include "../../gemm/experts.h"

namespace fused_mlp::sm90 {

extern const GroupedKernels kGroupedKernels;

GroupedPlan plan_grouped(const GroupedProblem& problem, int multiprocessors);

// For many rows, sorted into blocks.
GroupedPlan plan_tiles(const Routes& routes, int block_rows);

}  // namespace fused_mlp::sm90
