// Which kernel computes a product: one of the GPU's architecture, or torch's GEMM with a pointwise kernel behind it.
#include <algorithm>

#include "architecture.h"

namespace fused_mlp {
namespace {

constexpr const Architecture* kArchitectures[] = {&sm90::kArchitecture};

// How much longer torch's GEMM keeps the CPU busy than a launch of ours does (measured on an H100 host). The CPU never
// waits for a kernel that the GPU finishes within this time.
constexpr double kTorchCpuMicroseconds = 12.0;
constexpr int64_t kFewRows = 256;  // up to here a product behind a fused GEMM may be bound by the CPU

// How much of its start a streamed kernel hides behind the GEMM before it (measured on an H100). torch's hides nothing.
constexpr double kEarlyMicroseconds = 3.0;

double products(const GemmProblem& p) { return p.gated() ? 2.0 : 1.0; }

// The time that the bytes or the arithmetic of a product take at the GPU's peak, whichever is longer.
double floor_microseconds(const GemmProblem& p, const TorchComparison& torch) {
  const double bytes = 2.0 * (static_cast<double>(p.m) * (p.k + p.n) + products(p) * p.n * p.k);
  const double flops = 2.0 * products(p) * p.m * p.n * p.k;
  return std::max(bytes / torch.bytes_per_microsecond, flops / torch.flops_per_microsecond);
}

}  // namespace

const Architecture* architecture_of(const Gpu& gpu) {
  const auto found = std::find_if(std::begin(kArchitectures), std::end(kArchitectures),
                                  [&](const Architecture* each) { return each->runs_on(gpu); });
  return found == std::end(kArchitectures) ? nullptr : *found;
}

Refusal choose_gemm(const Architecture& architecture, const GemmProblem& p, const Gpu& gpu, GemmPlan* plan) {
  const Refusal refusal = architecture.refusal(p);
  if (refusal != Refusal::kNone) return refusal;

  const TorchComparison& torch = architecture.torch;
  const bool torch_rows = !p.gated() && (p.linear() ? torch.plain : torch.activated).contain(p.m);
  // A call takes the GPU's time or the CPU's, whichever is longer. For a plain product on its own only the GPU's time
  // counts. Behind a fused GEMM, which has already saved time, the CPU's counts too.
  const bool cpu_counts = !p.linear() || (p.follows_gemm && p.m <= kFewRows);
  const bool near_floor_counts = p.linear() && p.m <= torch.near_floor_rows;
  if (torch_rows && !cpu_counts && !near_floor_counts) return Refusal::kTorchIsFaster;

  *plan = architecture.choose(p, gpu);
  const bool early = p.follows_gemm && plan->kernel.loop == MainLoop::kStreamed;
  const double microseconds = plan->microseconds - (early ? kEarlyMicroseconds : 0.0);
  const bool ours = !torch_rows || (cpu_counts && plan->microseconds <= kTorchCpuMicroseconds) ||
                    (near_floor_counts && microseconds <= torch.near_floor * floor_microseconds(p, torch));
  return ours ? Refusal::kNone : Refusal::kTorchIsFaster;
}

}  // namespace fused_mlp
