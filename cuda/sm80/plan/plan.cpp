#include "plan.h"

#include <algorithm>
#include <iterator>
#include <limits>

#include "time_model.h"

namespace fused_mlp::sm80 {
namespace {

// True if the kernel is compiled for a GPU, and fits into its shared memory. 8.7 has as much as 8.0, but runs the code
// of 8.6.
bool has_code(const ListedKernel& listed, const Gpu& gpu) {
  const bool large = (gpu.major == 8 || gpu.major == 9) && gpu.minor == 0;
  return listed.shared_bytes <= (large ? gpu.shared_of_cta : kLeastSharedOfCta);
}

// The tensor cores idle while the four warps of a small tile store it, unless a second CTA has work for them.
bool has_room(const ListedKernel& listed, const Gpu& gpu) {
  const int ctas = listed.kernel.loop == MainLoop::kTiled && listed.shape.threads() <= 128 ? 2 : 1;
  return has_code(listed, gpu) && resident_ctas(listed.shared_bytes, gpu.shared_of_multiprocessor) >= ctas;
}

bool differ_in_ring_alone(const ListedKernel& first, const ListedKernel& second) {
  GemmKernel with_first_ring = second.kernel;
  with_first_ring.ring = first.kernel.ring;
  return first.kernel == with_first_ring && first.shape.ctas == second.shape.ctas;
}

}  // namespace

bool offered(size_t place, const Gpu& gpu) {
  const ListedKernel* kernel = kListed + place;
  return has_room(*kernel, gpu) && std::none_of(kListed, kernel, [&](const ListedKernel& before) {
           return differ_in_ring_alone(before, *kernel) && has_room(before, gpu);
         });
}

GemmPlan choose(const GemmProblem& p, const Gpu& gpu) {
  constexpr int64_t kStreamedTiles = 2;  // maximum number of tiles of rows: each reads all the weights
  GemmPlan best{{}, std::numeric_limits<double>::infinity()};
  for (size_t place = 0; place < std::size(kListed); ++place) {
    const ListedKernel& listed = kListed[place];
    const GemmKernel& kernel = listed.kernel;
    if (kernel.product != p.product() || !offered(place, gpu)) continue;
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
