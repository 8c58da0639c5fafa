#include "plan.h"

#include <limits>

#include "time_model.h"
#include "tuning.h"

namespace fused_mlp::sm80 {

GemmPlan choose(const GemmProblem& p, const Gpu& gpu) {
  constexpr int64_t kStreamedTiles = 2;  // of rows, at most: each reads all the weights
  GemmPlan best{{}, std::numeric_limits<double>::infinity()};
  for (const ListedKernel& listed : kListed) {
    const GemmKernel& kernel = listed.kernel;
    if (kernel.product != p.product() || !has_code(listed, gpu)) continue;
    if (kernel.loop == MainLoop::kStreamed && ceil_div(p.m, kernel.block_m) > kStreamedTiles) continue;
    const double microseconds = estimated_microseconds(p, listed, gpu);
    if (microseconds < best.microseconds) best = {kernel, microseconds};
  }
  return best;
}

Refusal decide(const GemmProblem& p, const Gpu& gpu, GemmPlan* plan) {
  *plan = choose(p, gpu);
  return plan->microseconds * kMargin <= torch_microseconds(p, gpu) ? Refusal::kNone : Refusal::kTorchByModel;
}

}  // namespace fused_mlp::sm80
