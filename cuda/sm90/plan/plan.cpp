#include "plan.h"

#include <array>
#include <limits>

#include "training_times.h"
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
    for (const TunedKernel& training : kTrainingTimes) {
      if (training.kernel == kKernels[i]) times[i] = &training.time;
    }
  }
  return times;
}();

// Streamed kernels for few rows are compared with those of sm_80, and others with tiled ones: each choice is fitted by
// itself.
const StreamedTime& streamed_time(const GemmProblem& p) {
  if (p.m >= kTallRows) return kStreamedTall;
  const bool few = p.m < kTiledRows;
  if (p.gated()) return few ? kStreamedFewGated : kStreamedGated;
  if (p.linear()) return few ? kStreamedFewPlain : kStreamedPlain;
  return few ? kStreamedFewActivated : kStreamedActivated;
}

}  // namespace

GemmPlan choose(const GemmProblem& p, const Chip& chip) {
  const StreamedTime& streamed = streamed_time(p);
  GemmPlan best{{}, std::numeric_limits<double>::infinity()};
  for_each_candidate(p, chip.multiprocessors, [&](size_t index, const GemmKernel& kernel) {
    constexpr double kMasked = 1.06;  // of wide tiles, which spill registers (three shapes on an H200)
    const double masked = p.low_rank.kept != nullptr && kernel.block_n > kWidestMasked ? kMasked : 1.0;
    const auto consider = [&](const auto& time) {
      const GemmPlan plan{kernel, masked * estimated_microseconds(p, kernel, time, chip), nullptr,
                          hidden_microseconds(p, kernel, chip)};
      if (plan.longest() < best.longest()) best = plan;
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
