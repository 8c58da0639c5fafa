// Decides which kernel computes a product: one of the GPU's architecture, or torch's GEMM and a pointwise kernel after
// it.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <type_traits>

#include "../architecture.h"
#include "lines.h"

namespace fused_mlp {
namespace {

// A GPU's architecture is the first row that runs on it and is enabled.
constexpr struct {
  const Architecture* architecture;
  bool taken;     // by default; otherwise its kernels run only if a test forces them
  bool training;  // the same for its kernels of training
} kArchitectures[] = {
    {&sm90::kArchitecture, true, true},
    {&sm80::kArchitecture, true, true},  // after sm90: Hopper GPUs can run it too, and use it for few rows
};

// The setting of fused_mlp_force_gemms().
std::atomic<const Architecture*> forced_architecture{nullptr};
std::atomic<int> forced_kernel{-1};

GemmPlan forced_plan(const Architecture& architecture, const GemmProblem& p, const Gpu& gpu) {
  const int kernel = forced_kernel;
  const bool suits = kernel >= 0 && architecture.kernels[kernel].product == p.product();
  GemmPlan plan = suits ? GemmPlan{architecture.kernels[kernel], 0.0} : architecture.choose(p, gpu);
  plan.architecture = &architecture;
  return plan;
}

// The kernel with the lowest estimated time, of the GPU's architecture and of those considered in addition. If
// estimates are equal, the additional one wins: with few rows it takes up to a tenth less time if the weights are in
// L2.
GemmPlan fastest(const Architecture& architecture, const GemmProblem& p, const Gpu& gpu) {
  constexpr double kAlike = 1.005;
  GemmPlan best = architecture.choose(p, gpu);
  best.architecture = &architecture;
  for (const auto& row : kArchitectures) {
    const Architecture& beside = *row.architecture;
    if (&beside == &architecture || beside.choose_beside == nullptr || !beside.runs_on(gpu)) continue;
    const GemmPlan plan = beside.choose_beside(p, gpu);
    if (plan.longest() < kAlike * best.longest()) best = {plan.kernel, plan.microseconds, &beside, plan.hidden};
  }
  return best;
}

// True if torch computes a product of training.
bool leaves_training_to_torch(const Architecture& architecture, Product product) {
  const auto& kernels = architecture.kernels;
  if (std::none_of(kernels.begin(), kernels.end(), [&](const GemmKernel& k) { return k.product == product; })) {
    return true;
  }
  return forced_architecture == nullptr &&
         std::none_of(std::begin(kArchitectures), std::end(kArchitectures),
                      [&](const auto& row) { return row.architecture == &architecture && row.training; });
}

// If the CPU launches a product itself, not through a graph, a call of torch's GEMM keeps it busy for at least 10 us
// more than a launch of ours. In an eager model with short products, the GPU waits for the CPU (measured in models of
// 15 types on an H200). So we use our kernel for any product of up to kNeverAwaited microseconds, however long torch's
// takes. We use it for products of up to kSometimesAwaited if it is estimated to take at most hardly_longer()
// microseconds more than torch's. The bounds are higher in a block, where the CPU also has to launch an attention; for
// a single call it is unknown what else will be launched.
constexpr double kNeverAwaited = 16.5, kSometimesAwaited = 100.0;
constexpr double hardly_longer(Launcher launcher) { return launcher == Launcher::kCpuInBlock ? 10.0 : 6.0; }
// A pair replaces two of torch's GEMMs. The CPU takes at least 250 us for a forward and backward, so when it launches
// the kernels itself, it never waits for those whose pair takes a fifth of that.
constexpr double kLaunchedPairMicroseconds = 50.0;

constexpr int64_t kTorchRows = 33;  // with fewer, our products take less time, except some with few inputs

// True if torch's GEMM reads the operands of a product of training faster, whatever the estimates. Rows that are not
// whole lines need more requests in our kernels, and rows that are not whole sectors up to twice as many.
bool torch_reads_faster(const GemmProblem& p) {
  if (!rows_fill(p, kSectorBytes)) return p.m >= 64;
  // The saving of the fused epilogue does not grow with k; the cost of the requests does.
  constexpr int64_t kManyRows = 256, kLong = 2560;
  return !rows_fill(p, kLineBytes) && p.gated() && p.m >= kManyRows && p.k > kLong;
}

// The factor by which our kernels take longer than estimated, relative to torch's, if rows are not whole lines or
// sectors: the longer a row, the more requests it takes. CTAs that share k each read a part of a row, and lose less.
// Fitted to 2700 products on an H100 and an H200.
double broken_rows_factor(const GemmProblem& p, const GemmKernel& kernel) {
  constexpr int64_t kManyRows = 65, kManyGatedRows = 257;
  if (!rows_fill(p, kSectorBytes)) {
    if (p.m < (p.gated() ? kManyRows : kTorchRows)) return 1.0;
    if (kernel.split_k > 1) return 1.1;
    return std::min(1.5, 0.95 + p.k / (p.gated() ? 1200.0 : 2400.0));
  }
  return p.m >= (p.gated() ? kManyGatedRows : kManyRows) && !rows_fill(p, kLineBytes) ? 0.95 + p.k / 16e3 : 1.0;
}

double products(const GemmProblem& p) { return p.pair() ? p.terms() : p.gated() ? 2.0 : 1.0; }

// The time that the arithmetic of a product takes at the GPU's peak.
double arithmetic_microseconds(const GemmProblem& p, const Peak& peak) {
  return 2.0 * products(p) * p.m * p.n * p.k / peak.flops_per_microsecond;
}

// The time that a low-rank product adds to each of torch's GEMMs: its results are written, and read again.
double low_rank_microseconds(const GemmProblem& p, const Peak& peak) {
  constexpr double kLaunch = 2.0;
  const int terms = (p.low_rank.k > 0) + (p.low_rank.up_k > 0);
  return terms * (kLaunch + 4.0 * p.m * p.n / peak.bytes_per_microsecond);
}

// A lower bound of the time of a product of training composed of torch's kernels. It favours torch's GEMM: ours is used
// only if it is estimated to take less than that. For a sum of products the bound is too low; the factor kSeveral lost
// the least time over 410 shapes on an H200.
double composed_microseconds(const GemmProblem& p, const Peak& peak) {
  constexpr double kLaunch = 2.0, kSeveral = 1.06;
  const double bytes = 2.0 * (static_cast<double>(p.m) * (p.k + p.n) + products(p) * p.n * p.k);
  const double floor = std::max(bytes / peak.bytes_per_microsecond, arithmetic_microseconds(p, peak));
  const int matrices = composed_matrices(p.product()) * (p.pair() ? p.terms() - 1 : 1);
  const double moved = 2.0 * matrices * p.m * p.n / peak.bytes_per_microsecond;
  const double several = p.pair() && p.terms() > 1 ? kSeveral : 1.0;
  return several * (floor + kLaunch + moved) + low_rank_microseconds(p, peak);
}

// For few outputs and a long k torch's GEMM takes less time than ours, which can split k only among the CTAs of a
// cluster.
bool has_few_outputs_of_long_k(const GemmProblem& p, int64_t long_k) {
  constexpr int64_t kFewOutputs = 256;
  return p.n <= kFewOutputs && p.k > long_k;
}
constexpr int64_t kLongK = 10240;

// True if torch computes a plain product of more than a few rows, whatever the estimates.
bool is_left_to_torch(const GemmProblem& p, const GemmPlan& plan, const Peak& peak) {
  // Ours saves little with a long product, or with more rows than were measured, where estimates are least certain.
  constexpr double kLongMicroseconds = 60.0;
  constexpr int64_t kMostRows = 2048;
  if (arithmetic_microseconds(p, peak) > kLongMicroseconds || p.m > kMostRows) return true;
  // A tiled kernel after a kernel that is not ours takes 1 to 1.5 us more than after one of ours.
  if (!p.follows_ours() && plan.kernel.loop == MainLoop::kTiled) return true;
  return has_few_outputs_of_long_k(p, kLongK) || (p.m >= kTorchRows && !rows_fill(p, kSectorBytes));
}

// True if a product of many rows has fewer tiles of 128 x 128 than two thirds of the multiprocessors, and takes long
// enough for that to matter. torch's GEMM may compute each of so few tiles with a whole k: it took up to 1.45 times as
// long as ours (measured on an H200).
bool has_few_long_tiles(const GemmProblem& p, const GemmPlan& plan, const Gpu& gpu) {
  constexpr int64_t kManyRows = 257, kTile = 128;
  constexpr double kLongMicroseconds = 15.0;
  return p.m >= kManyRows && plan.microseconds >= kLongMicroseconds &&
         3 * ceil_div(p.m, kTile) * ceil_div(p.n, kTile) <= 2 * gpu.multiprocessors;
}

// The fraction of torch's estimated time that ours may take.
double margin(const GemmProblem& p, const GemmPlan& plan, const Gpu& gpu) {
  constexpr double kGated = 1.05, kLongGated = 1.02, kLongGatedMicroseconds = 20.0;
  if (p.gated()) return plan.microseconds > kLongGatedMicroseconds ? kLongGated : kGated;
  // In an MLP, where `a` was written just before, a plain product of ours that does not start early takes up to 3 us
  // more than in isolation; torch's takes hardly any more. With torch, an activation costs the CPU one more launch.
  // With few rows the product after an activated one of ours starts early, so an MLP gains if the estimates are equal.
  // With more rows, torch's short products take up to 1.3 times as long as estimated if their weights come from memory
  // (measured on an H100 and an H200).
  constexpr double kPlain = 0.78, kEarly = 0.95, kActivated = 0.92, kOfFewRows = 1.05, kShort = 1.1;
  constexpr double kShortMicroseconds = 10.0;
  // The shorter k is, the larger is the pointwise kernel's part of torch's time (measured on an H200).
  constexpr double kActivatedOfShortK = 0.98, kFewLongTiles = 0.92;
  constexpr int64_t kFewRows = 64, kShortK = 3072;
  if (p.linear()) return plan.hidden > 0.0 ? kEarly : has_few_long_tiles(p, plan, gpu) ? kFewLongTiles : kPlain;
  if (p.m <= kFewRows) return kOfFewRows;
  const bool gains = rows_fill(p, kSectorBytes) && !has_few_outputs_of_long_k(p, kLongK / 2);
  if (gains && plan.microseconds <= kShortMicroseconds) return kShort;
  return p.k < kShortK ? kActivatedOfShortK : kActivated;
}

double torch_microseconds(const Architecture& architecture, const GemmProblem& p, const Gpu& gpu) {
  return architecture.torch_microseconds(p, gpu) + low_rank_microseconds(p, architecture.peak(gpu));
}

// True if a product of inference is estimated to take less time than torch's GEMM followed by the activation's
// pointwise kernel. A gated product replaces two of torch's.
bool is_faster(const Architecture& architecture, const GemmProblem& p, const GemmPlan& plan, const Gpu& gpu) {
  constexpr int64_t kTorchRowsOfBrokenSectors = 9;
  const double torch = torch_microseconds(architecture, p, gpu);
  const bool plain = p.linear() && !p.gated();
  const bool few_rows = p.m < (p.gated() || rows_fill(p, kSectorBytes) ? kTorchRows : kTorchRowsOfBrokenSectors);
  if (few_rows && p.gated()) return true;
  if (few_rows)
    return !has_few_outputs_of_long_k(p, kLongK) && (!plain || p.follows_ours() || plan.shortest() <= torch);
  if (plain && is_left_to_torch(p, plan, architecture.peak(gpu))) return false;
  return broken_rows_factor(p, plan.kernel) * plan.shortest() <= margin(p, plan, gpu) * torch;
}

// True if our kernel is used for a product of inference because it saves CPU time.
bool saves_cpu_time(const Architecture& architecture, const GemmProblem& p, const GemmPlan& plan, const Gpu& gpu,
                    Launcher launcher) {
  if (launcher == Launcher::kGraph) return false;
  if (plan.microseconds <= kNeverAwaited) return rows_fill(p, kSectorBytes);
  return plan.microseconds <= kSometimesAwaited && rows_fill(p, kLineBytes) &&
         plan.longest() <= torch_microseconds(architecture, p, gpu) + hardly_longer(launcher);
}

Refusal choose_anew(const Architecture& architecture, const GemmProblem& p, const Gpu& gpu, GemmPlan* plan,
                    Launcher launcher) {
  const Refusal refusal = architecture.refusal(p);
  if (refusal != Refusal::kNone) return refusal;
  const bool training = is_training(p.product());
  if (training && leaves_training_to_torch(architecture, p.product())) return Refusal::kTorchIsFaster;
  if (forced_architecture != nullptr) {
    *plan = forced_plan(architecture, p, gpu);
    return Refusal::kNone;
  }
  if (architecture.torch_microseconds == nullptr) {
    const Refusal decided = architecture.decide(p, gpu, plan);
    plan->architecture = &architecture;
    return decided;
  }
  if (training) {
    if (torch_reads_faster(p)) return Refusal::kTorchIsFaster;
    *plan = fastest(architecture, p, gpu);
    const bool hidden = launcher != Launcher::kGraph && p.pair() && plan->microseconds <= kLaunchedPairMicroseconds;
    const bool faster = plan->microseconds < composed_microseconds(p, architecture.peak(gpu));
    return hidden || faster ? Refusal::kNone : Refusal::kTorchIsFaster;
  }

  *plan = fastest(architecture, p, gpu);
  const bool faster = is_faster(architecture, p, *plan, gpu);
  return faster || saves_cpu_time(architecture, p, *plan, gpu, launcher) ? Refusal::kNone : Refusal::kTorchIsFaster;
}

// A cached choice, with everything that it depends on.
struct Choice {
  const Architecture* architecture;
  Gpu gpu;
  Launcher launcher;
  GemmProblem problem;
  GemmPlan plan;
  Refusal refusal;

  size_t slot(size_t count) const {
    const auto mixed =
        static_cast<uint64_t>(problem.n * 31 + problem.k) * 31 + problem.m * 7 + static_cast<int>(launcher);
    return mixed * 0x9E3779B97F4A7C15u >> 32 & (count - 1);
  }
  bool answers(const Choice& asked) const {
    return architecture == asked.architecture && launcher == asked.launcher && gpu == asked.gpu &&
           problem == asked.problem;
  }
};

// Reduces the addresses of a problem to what a choice depends on: the alignment of each operand within a memory line.
GemmProblem placed(GemmProblem p) {
  const auto place = [](auto*& data) {
    using Data = std::remove_reference_t<decltype(data)>;
    if (data != nullptr) data = reinterpret_cast<Data>(kLineBytes + reinterpret_cast<uintptr_t>(data) % kLineBytes);
  };
  TrainingMatrices& t = p.training;
  for (Matrix* matrix :
       {&p.a, &p.weight, &p.up_weight, &p.out, &t.second_a, &t.second_weight, &t.third_a, &t.third_weight, &t.gate,
        &t.up, &t.gate_gradient, &t.up_gradient, &p.low_rank.rows, &p.low_rank.weight, &p.low_rank.up_weight}) {
    place(matrix->data);
  }
  place(p.epilogue.bias);
  place(p.epilogue.up_bias);
  place(p.low_rank.kept);
  return p;
}

}  // namespace

const Architecture* architecture_of(const Gpu& gpu) {
  if (const Architecture* forced = forced_architecture) return forced->runs_on(gpu) ? forced : nullptr;
  const auto found = std::find_if(std::begin(kArchitectures), std::end(kArchitectures),
                                  [&](const auto& row) { return row.taken && row.architecture->runs_on(gpu); });
  return found == std::end(kArchitectures) ? nullptr : found->architecture;
}

const Architecture* architecture_of_experts(const Gpu& gpu, const GroupedProblem& first) {
  const Architecture* const own = architecture_of(gpu);
  if (own == nullptr || forced_architecture != nullptr) return own;
  for (const auto& row : kArchitectures) {
    const GroupedKernels* const kernels = row.architecture->grouped;
    const bool may_be = row.architecture != own && kernels != nullptr && kernels->are_faster_beside != nullptr;
    if (may_be && row.architecture->runs_on(gpu) && kernels->are_faster_beside(first, gpu)) return row.architecture;
  }
  return own;
}

const Architecture* architecture_of_trained_experts(const Gpu& gpu) {
  const Architecture* const forced = forced_architecture;
  const auto found = std::find_if(std::begin(kArchitectures), std::end(kArchitectures), [&](const auto& row) {
    const GroupedKernels* kernels = row.architecture->grouped;
    return (forced == nullptr ? row.taken : row.architecture == forced) && row.architecture->runs_on(gpu) &&
           kernels != nullptr && kernels->plan_training != nullptr;
  });
  return found == std::end(kArchitectures) ? nullptr : found->architecture;
}

bool forces_experts() { return forced_architecture != nullptr; }

Refusal choose_gemm(const Architecture& architecture, const GemmProblem& p, const Gpu& gpu, GemmPlan* plan,
                    Launcher launcher) {
  if (forced_architecture != nullptr) return choose_anew(architecture, p, gpu, plan, launcher);
  // A choice takes the CPU 3 us (H100 host), and a model needs the same few again and again.
  constexpr size_t kChoices = 64;
  thread_local std::unique_ptr<Choice[]> made;
  if (made == nullptr) made = std::make_unique<Choice[]>(kChoices);
  Choice asked{&architecture, gpu, launcher, placed(p), {}, {}};
  Choice& choice = made[asked.slot(kChoices)];
  if (!choice.answers(asked)) {
    asked.refusal = choose_anew(architecture, p, gpu, &asked.plan, launcher);
    choice = asked;
  }
  *plan = choice.plan;
  return choice.refusal;
}

bool guesses(const GemmPlan& plan, const Gpu& gpu) {
  return plan.architecture == architecture_of(gpu) && guesses(*plan.architecture, gpu);
}

bool guesses(const Architecture& architecture, const Gpu& gpu) {
  return architecture.torch_microseconds == nullptr && !architecture.measured(gpu);
}

}  // namespace fused_mlp

// For tests and benchmarks, which call it through ctypes while no other thread computes. From now on the kernels of the
// named architecture compute everything that they can, on every GPU that they run on. `kernel` is the index of a kernel
// in its list, to be used wherever it can compute the product; -1 leaves the choice to the architecture. Without a name
// the defaults are restored. Returns the number of the architecture's kernels, or -1 if there is no such architecture
// or kernel.
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
