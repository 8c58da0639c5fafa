// Which kernel computes a product: one of the GPU's architecture, or torch's GEMM with a pointwise kernel behind it.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "architecture.h"

namespace fused_mlp {
namespace {

// The first row that runs on a GPU, and is taken, is the GPU's.
constexpr struct {
  const Architecture* architecture;
  bool taken;     // by itself; where it is not, its kernels run only where a test forces them
  bool training;  // likewise its kernels of training
} kArchitectures[] = {
    {&sm90::kArchitecture, true, true},
    {&sm80::kArchitecture, true, true},  // behind sm90: a Hopper GPU, which can run them, gets those for few rows
};

// What fused_mlp_force_gemms() was told.
std::atomic<const Architecture*> forced_architecture{nullptr};
std::atomic<int> forced_kernel{-1};

GemmPlan forced_plan(const Architecture& architecture, const GemmProblem& p, const Gpu& gpu) {
  const int kernel = forced_kernel;
  const bool suits = kernel >= 0 && architecture.kernels[kernel].product == p.product();
  GemmPlan plan = suits ? GemmPlan{architecture.kernels[kernel], 0.0} : architecture.choose(p, gpu);
  plan.architecture = &architecture;
  return plan;
}

// The kernel of the least estimated time, of the GPU's architecture and of those beside it.
GemmPlan fastest(const Architecture& architecture, const GemmProblem& p, const Gpu& gpu) {
  GemmPlan best = architecture.choose(p, gpu);
  best.architecture = &architecture;
  for (const auto& row : kArchitectures) {
    const Architecture& beside = *row.architecture;
    if (&beside == &architecture || beside.choose_beside == nullptr || !beside.runs_on(gpu)) continue;
    const GemmPlan plan = beside.choose_beside(p, gpu);
    if (plan.microseconds < best.microseconds) best = {plan.kernel, plan.microseconds, &beside};
  }
  return best;
}

// Whether a product of training is left to torch.
bool leaves_training_to_torch(const Architecture& architecture, Product product) {
  const auto& kernels = architecture.kernels;
  if (std::none_of(kernels.begin(), kernels.end(), [&](const GemmKernel& k) { return k.product == product; })) {
    return true;
  }
  return forced_architecture == nullptr &&
         std::none_of(std::begin(kArchitectures), std::end(kArchitectures),
                      [&](const auto& row) { return row.architecture == &architecture && row.training; });
}

// How much longer torch's GEMM keeps the CPU busy than a launch of ours does (measured on an H100 host). The CPU never
// waits for a kernel that the GPU finishes within this time.
constexpr double kTorchCpuMicroseconds = 12.0;
constexpr int64_t kFewRows = 256;  // up to here a product behind a fused GEMM may be bound by the CPU
// The CPU takes 30 us at least for a call with two products of ours: where it launches them, and not a graph, it never
// waits for those that take half of that each.
constexpr double kLaunchedMicroseconds = 15.0;
// A pair takes the place of two of torch's GEMMs. The CPU takes 250 us at least for a forward and backward: where it
// launches them, it never waits for those whose pair takes a fifth of that.
constexpr double kLaunchedPairMicroseconds = 50.0;

// How much of its start a streamed kernel hides behind the GEMM before it (measured on an H100). torch's hides nothing.
constexpr double kEarlyMicroseconds = 3.0;

// Whether a product leaves weight rows that do not fill lines of 128 bytes to torch's GEMM, which reads them faster
// than our kernels do: at 8, 16, 32 and 64 rows of 11776 x 4360 with an activation ours took 1.06, 1.18, 1.33 and 1.31
// of the time of torch's GEMM and a pointwise kernel (measured on an H200). A gated product takes two of torch's.
bool reads_parts_of_lines(const GemmProblem& p) {
  constexpr int64_t kLineElements = 64;
  constexpr int64_t kFirst = 9, kLast = 64;  // rows; at 8 it is little, beyond 64 not measured
  return !p.gated() && kFirst <= p.m && p.m <= kLast && p.weight.row_stride % kLineElements != 0;
}

double products(const GemmProblem& p) { return p.gated() || p.pair() ? 2.0 : 1.0; }

// The time that the bytes or the arithmetic of a product take at the GPU's peak, whichever is longer.
double floor_microseconds(const GemmProblem& p, const TorchComparison& torch) {
  const double bytes = 2.0 * (static_cast<double>(p.m) * (p.k + p.n) + products(p) * p.n * p.k);
  const double flops = 2.0 * products(p) * p.m * p.n * p.k;
  return std::max(bytes / torch.bytes_per_microsecond, flops / torch.flops_per_microsecond);
}

// The time that a product of training takes at least where it is composed. It flatters torch's GEMM: ours is taken
// where it is estimated to take less than that.
double composed_microseconds(const GemmProblem& p, const TorchComparison& torch) {
  constexpr double kLaunch = 2.0;
  const int matrices = composed_matrices(p.product());
  return floor_microseconds(p, torch) + kLaunch + 2.0 * matrices * p.m * p.n / torch.bytes_per_microsecond;
}

}  // namespace

const Architecture* architecture_of(const Gpu& gpu) {
  if (const Architecture* forced = forced_architecture) return forced->runs_on(gpu) ? forced : nullptr;
  const auto found = std::find_if(std::begin(kArchitectures), std::end(kArchitectures),
                                  [&](const auto& row) { return row.taken && row.architecture->runs_on(gpu); });
  return found == std::end(kArchitectures) ? nullptr : found->architecture;
}

Refusal choose_gemm(const Architecture& architecture, const GemmProblem& p, const Gpu& gpu, GemmPlan* plan,
                    bool launched_behind) {
  const Refusal refusal = architecture.refusal(p);
  if (refusal != Refusal::kNone) return refusal;
  const bool training = is_training(p.product());
  if (training && leaves_training_to_torch(architecture, p.product())) return Refusal::kTorchIsFaster;
  if (forced_architecture != nullptr) {
    *plan = forced_plan(architecture, p, gpu);
    return Refusal::kNone;
  }
  if (architecture.torch == nullptr) {
    const Refusal decided = architecture.decide(p, gpu, plan);
    plan->architecture = &architecture;
    return decided;
  }
  if (training) {
    *plan = fastest(architecture, p, gpu);
    const bool hidden = launched_behind && p.pair() && plan->microseconds <= kLaunchedPairMicroseconds;
    const bool faster = plan->microseconds < composed_microseconds(p, architecture.torch(gpu));
    return hidden || faster ? Refusal::kNone : Refusal::kTorchIsFaster;
  }

  const TorchComparison torch = architecture.torch(gpu);
  const bool torch_rows = !p.gated() && (p.linear() ? torch.plain : torch.activated).contain(p.m);
  // A call takes the GPU's time or the CPU's, whichever is longer. For a plain product on its own only the GPU's time
  // counts. Behind a fused GEMM, which has already saved time, the CPU's counts too: of few rows, and of any number
  // where no graph launches it.
  const bool cpu_counts = !p.linear() || (p.follows_gemm && p.m <= kFewRows) || launched_behind;
  const bool near_floor_counts = p.linear() && p.m <= torch.near_floor_rows;
  if (torch_rows && !cpu_counts && !near_floor_counts) return Refusal::kTorchIsFaster;

  *plan = fastest(architecture, p, gpu);
  const bool early = p.follows_gemm && plan->kernel.loop == MainLoop::kStreamed;
  const double microseconds = plan->microseconds - (early ? kEarlyMicroseconds : 0.0);
  const double cpu_microseconds = launched_behind ? kLaunchedMicroseconds : kTorchCpuMicroseconds;
  const bool near_floor = near_floor_counts && microseconds <= torch.near_floor * floor_microseconds(p, torch);
  const bool faster = (!torch_rows || near_floor) && !reads_parts_of_lines(p);
  const bool hidden = cpu_counts && plan->microseconds <= cpu_microseconds;
  return faster || hidden ? Refusal::kNone : Refusal::kTorchIsFaster;
}

bool guesses(const GemmPlan& plan, const Gpu& gpu) {
  return plan.architecture == architecture_of(gpu) && plan.architecture->torch == nullptr &&
         !plan.architecture->measured(gpu);
}

}  // namespace fused_mlp

// For tests and benchmarks, which call it through ctypes, while no other thread computes: from now on the kernels of an
// architecture compute all that they can, on every GPU that they run on; the one of this number in its list wherever it
// computes such a product, or with -1 the one it chooses. Without a name all is as before. Returns the number of the
// architecture's kernels, or -1 if there is none of this name or no such kernel.
extern "C" __attribute__((visibility("default"))) int fused_mlp_force_gemms(const char* name, int kernel) {
  using namespace fused_mlp;
  if (name == nullptr) {
    forced_architecture = nullptr;
    return 0;
  }
  const auto found = std::find_if(std::begin(kArchitectures), std::end(kArchitectures),
                                  [&](const auto& row) { return std::strcmp(row.architecture->name, name) == 0; });
  if (found == std::end(kArchitectures)) return -1;
  const int kernels = static_cast<int>(found->architecture->kernels.size());
  if (kernel < -1 || kernel >= kernels) return -1;
  forced_kernel = kernel;
  forced_architecture = found->architecture;
  return kernels;
}
