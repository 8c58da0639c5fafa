#include "plan.h"

#include <array>
#include <limits>

#include "tuning.h"

namespace fused_mlp::sm90 {
namespace {

// The measured constants of each tiled kernel in kKernels. Null for one that was not measured.
constexpr auto kTiledTimes = [] {
  std::array<const TiledTime*, std::size(kKernels)> times{};
  for (size_t i = 0; i < times.size(); ++i) {
    for (const TunedKernel& tuned : kTuned) {
      if (tuned.kernel == kKernels[i]) times[i] = &tuned.time;
    }
  }
  return times;
}();

// Of the kernels of training, whose times are not measured yet: that whose tiles cover the fewest elements.
GemmPlan choose_by_area(const GemmProblem& p) {
  GemmPlan best{};
  int64_t least = std::numeric_limits<int64_t>::max();
  for (const GemmKernel& kernel : kKernels) {
    if (kernel.product != p.product()) continue;
    const int64_t area =
        ceil_div(p.m, kernel.block_m) * kernel.block_m * ceil_div(p.n, kernel.columns()) * kernel.columns();
    if (area < least) best = {kernel, 0.0}, least = area;
  }
  return best;
}

}  // namespace

GemmPlan choose(const GemmProblem& p, const Chip& chip) {
  if (is_training(p.product())) return choose_by_area(p);
  const StreamedTime& streamed = p.gated() ? kStreamedGated : p.linear() ? kStreamedPlain : kStreamedActivated;
  GemmPlan best{{}, std::numeric_limits<double>::infinity()};
  for_each_candidate(p, [&](size_t index, const GemmKernel& kernel) {
    const auto consider = [&](const auto& time) {
      const double microseconds = estimated_microseconds(p, kernel, time, chip);
      if (microseconds < best.microseconds) best = {kernel, microseconds};
    };
    if (kernel.loop == MainLoop::kStreamed) {
      consider(streamed);
    } else if (kTiledTimes[index] != nullptr) {
      consider(*kTiledTimes[index]);
    }
  });
  return best;
}

}  // namespace fused_mlp::sm90
