// A fused GEMM in the record of a call, which `explain` is made from.
#pragma once

#include "../../../torch-ext/ops/plan.h"
#include "../problem.h"

namespace fused_mlp {

// Adds the kernel to the record's last layer. `guessed`: by a model of a GPU that nobody has measured.
inline void record_kernel(const char* architecture, const GemmKernel& kernel, bool guessed, PlanRecord* plan) {
  plan->set("implementation", architecture).set("kernel", name(kernel.loop));
  plan->set("block_m", kernel.block_m).set("block_n", kernel.block_n);
  plan->set("schedule", name(kernel.schedule)).set("split_k", kernel.split_k);
  if (guessed) plan->set("basis", "model");
}

}  // namespace fused_mlp
