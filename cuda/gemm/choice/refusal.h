// The operands that the GEMMs of every architecture support: 16-bit elements, and rows aligned to 16 bytes.
#pragma once

#include "../../../torch-ext/ops/plan.h"
#include "../problem.h"

namespace fused_mlp {

Refusal refusal_of_operands(const GemmProblem& problem);

}  // namespace fused_mlp
