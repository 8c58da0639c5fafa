#include "plan.h"

#include <limits>

#include "time_model.h"

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
  const Tuning& tuning = tuning_of(gpu);
  if (plan->microseconds * tuning.margin() <= torch_microseconds(p, gpu)) return Refusal::kNone;
  return tuning.measured() ? Refusal::kTorchIsFaster : Refusal::kTorchByModel;
}

}  // namespace fused_mlp::sm80
