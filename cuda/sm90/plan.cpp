#include "plan.h"

#include <array>
#include <limits>

#include "tuning.h"

namespace fused_mlp::sm90 {
namespace {

bool aligned(const void* pointer, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

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

}  // namespace

Refusal refusal(const GemmProblem& p) {
  constexpr int64_t kMaxExtent = std::numeric_limits<int32_t>::max() - 1024;  // coordinates of tiles are 32-bit
  if (p.dtype == DType::kFloat32) return Refusal::kFloat32;
  if (p.m == 0 || p.n == 0 || p.k == 0) return Refusal::kEmpty;
  if (p.m > kMaxExtent || p.n > kMaxExtent || p.k > kMaxExtent) return Refusal::kTooLarge;
  if (p.n % 8 != 0 || p.k % 8 != 0) return Refusal::kOddFeatures;
  const auto addressable = [](const Matrix& matrix, int64_t cols) {
    return aligned(matrix.data, 16) && matrix.row_stride % 8 == 0 && matrix.row_stride >= cols;
  };
  if (!addressable(p.a, p.k) || !addressable(p.weight, p.k) || (p.gated() && !addressable(p.up_weight, p.k)) ||
      !addressable(p.out, p.n)) {
    return Refusal::kUnalignedRows;
  }
  if (!aligned(p.epilogue.bias, 4) || !aligned(p.epilogue.up_bias, 4)) return Refusal::kUnalignedBias;
  return Refusal::kNone;
}

GemmPlan choose(const GemmProblem& p, int multiprocessors) {
  const StreamedTime& streamed = p.gated() ? kStreamedGated : p.linear() ? kStreamedPlain : kStreamedActivated;
  GemmPlan best{{}, std::numeric_limits<double>::infinity()};
  for_each_candidate(p, [&](size_t index, const GemmKernel& kernel) {
    const auto consider = [&](const auto& time) {
      const double microseconds =
          estimated_microseconds(p, kernel, time, kTorch.bytes_per_microsecond, multiprocessors);
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
