// Writes a fused GEMM into the record of a call, from which `explain` is made.
#pragma once

#include "../../../torch-ext/ops/plan.h"
#include "../problem.h"

namespace fused_mlp {

// Adds the kernel to the record's last layer. `guessed`: chosen by a model of a GPU that was never measured.
inline void record_kernel(const char* architecture, const GemmKernel& kernel, bool guessed, PlanRecord* plan) {
  plan->set("implementation", architecture).set("kernel", name(kernel.loop));
  plan->set("block_m", kernel.block_m).set("block_n", kernel.block_n);
  plan->set("schedule", name(kernel.schedule)).set("split_k", kernel.split_k);
  if (guessed) plan->set("basis", "model");
}

}  // namespace fused_mlp
