// Which kernel computes a product: one of the GPU's architecture, or torch's GEMM with a pointwise kernel behind it.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <type_traits>

#include "../architecture.h"
#include "lines.h"

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

// The setting of fused_mlp_force_gemms().
std::atomic<const Architecture*> forced_architecture{nullptr};
std::atomic<int> forced_kernel{-1};

GemmPlan forced_plan(const Architecture& architecture, const GemmProblem& p, const Gpu& gpu) {
  const int kernel = forced_kernel;
  // A kernel that makes an adapter's rows is one of few, and has room for them.
  const bool suits = kernel >= 0 && architecture.kernels[kernel].product == p.product() && !p.low_rank.makes_rows();
  GemmPlan plan = suits ? GemmPlan{architecture.kernels[kernel], 0.0} : architecture.choose(p, gpu);
  plan.architecture = &architecture;
  return plan;
}

// The kernel of the least estimated time, of the GPU's architecture and of those beside it. Of two that are estimated
// alike, the one beside is taken: of a few rows it takes up to a tenth less where the weights are found in L2.
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

// True if a product of training is left to torch.
bool leaves_training_to_torch(const Architecture& architecture, Product product) {
  const auto& kernels = architecture.kernels;
  if (std::none_of(kernels.begin(), kernels.end(), [&](const GemmKernel& k) { return k.product == product; })) {
    return true;
  }
  return forced_architecture == nullptr &&
         std::none_of(std::begin(kArchitectures), std::end(kArchitectures),
                      [&](const auto& row) { return row.architecture == &architecture && row.training; });
}

// If the CPU launches a product, and not a graph, a call of torch's GEMM keeps it busy for at least 10 us more than
// a launch of ours. In an eager model whose products are short, the GPU waits for the CPU (measured in models of 15
// types on an H200). So a product of up to kNeverAwaited microseconds is ours whatever torch's takes, and one of up to
// kSometimesAwaited where it is estimated to take at most hardly_longer() microseconds more than torch's. That is more
// in a block, where the CPU also has an attention to launch; of a call alone nobody knows what else there is to launch.
constexpr double kNeverAwaited = 16.5, kSometimesAwaited = 100.0;
constexpr double hardly_longer(Launcher launcher) { return launcher == Launcher::kCpuInBlock ? 10.0 : 6.0; }
// A pair takes the place of two of torch's GEMMs. The CPU takes 250 us at least for a forward and backward: where it
// launches them, it never waits for those whose pair takes a fifth of that.
constexpr double kLaunchedPairMicroseconds = 50.0;

constexpr int64_t kTorchRows = 33;  // with fewer, products of ours take less time, but for some of few inputs

// True if torch's GEMM reads the operands of a product of training faster, whatever is estimated. Rows that are not
// whole lines take our kernels more requests, and rows that are not whole sectors up to twice as many.
bool torch_reads_faster(const GemmProblem& p) {
  if (!rows_fill(p, kSectorBytes)) return p.m >= 64;
  // The saving of the fused epilogue does not grow with k, the cost of the requests does.
  constexpr int64_t kManyRows = 256, kLong = 2560;
  return !rows_fill(p, kLineBytes) && p.gated() && p.m >= kManyRows && p.k > kLong;
}

// By how much our kernels take longer than estimated, next to torch's, where rows are no whole lines or no whole
// sectors: the longer a row, the more requests it takes. CTAs that share k, and read a part of a row each, lose less.
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

// The time that a product of few columns beside each of torch's GEMMs adds: its results are written, and read again.
double low_rank_microseconds(const GemmProblem& p, const Peak& peak) {
  constexpr double kLaunch = 2.0;
  const int terms = (p.low_rank.k > 0) + (p.low_rank.up_k > 0);
  return terms * (kLaunch + 4.0 * p.m * p.n / peak.bytes_per_microsecond);
}

// The time that a product of training takes at least where it is composed. It flatters torch's GEMM: ours is taken
// where it is estimated to take less than that. Of several products that are added up it flatters more: they take
// longer by kSeveral, with which the least was lost over 410 shapes on an H200.
double composed_microseconds(const GemmProblem& p, const Peak& peak) {
  constexpr double kLaunch = 2.0, kSeveral = 1.06;
  const double bytes = 2.0 * (static_cast<double>(p.m) * (p.k + p.n) + products(p) * p.n * p.k);
  const double floor = std::max(bytes / peak.bytes_per_microsecond, arithmetic_microseconds(p, peak));
  const int matrices = composed_matrices(p.product()) * (p.pair() ? p.terms() - 1 : 1);
  const double moved = 2.0 * matrices * p.m * p.n / peak.bytes_per_microsecond;
  const double several = p.pair() && p.terms() > 1 ? kSeveral : 1.0;
  return several * (floor + kLaunch + moved) + low_rank_microseconds(p, peak);
}

// Few outputs of a long k take torch's GEMM less time than ours, which splits k among the CTAs of a cluster at most.
bool has_few_outputs_of_long_k(const GemmProblem& p, int64_t long_k) {
  constexpr int64_t kFewOutputs = 256;
  return p.n <= kFewOutputs && p.k > long_k;
}
constexpr int64_t kLongK = 10240;

// True if a plain product of more than a few rows is torch's whatever is estimated.
bool is_left_to_torch(const GemmProblem& p, const GemmPlan& plan, const Peak& peak) {
  // Ours saves little of a long product, or of one with more rows than were measured, where estimates are least sure.
  constexpr double kLongMicroseconds = 60.0;
  constexpr int64_t kMostRows = 2048;
  if (arithmetic_microseconds(p, peak) > kLongMicroseconds || p.m > kMostRows) return true;
  // By tiles and behind a kernel that is not ours, it takes 1 to 1.5 us more than behind ours.
  if (!p.follows_ours() && plan.kernel.loop == MainLoop::kTiled) return true;
  return has_few_outputs_of_long_k(p, kLongK) || (p.m >= kTorchRows && !rows_fill(p, kSectorBytes));
}

// True if a product of many rows has fewer tiles of 128 x 128 than two thirds of the multiprocessors, and takes long
// enough for that to count. torch's GEMM may give each of so few a whole k: it took up to 1.45 times as long as ours
// (measured on an H200).
bool has_few_long_tiles(const GemmProblem& p, const GemmPlan& plan, const Gpu& gpu) {
  constexpr int64_t kManyRows = 257, kTile = 128;
  constexpr double kLongMicroseconds = 15.0;
  return p.m >= kManyRows && plan.microseconds >= kLongMicroseconds &&
         3 * ceil_div(p.m, kTile) * ceil_div(p.n, kTile) <= 2 * gpu.multiprocessors;
}

// The part of torch's estimated time that ours is to take at most.
double margin(const GemmProblem& p, const GemmPlan& plan, const Gpu& gpu) {
  constexpr double kGated = 1.05, kLongGated = 1.02, kLongGatedMicroseconds = 20.0;
  if (p.gated()) return plan.microseconds > kLongGatedMicroseconds ? kLongGated : kGated;
  // In an MLP, where a was written right before, a plain product of ours that does not start early takes up to 3 us
  // more than by itself, and torch's hardly any. In torch's way, an activation costs the CPU a launch more. With few
  // rows the product behind an activated one of ours starts early: an MLP gains by that where the estimates are alike.
  // With more, torch's short products take up to 1.3 times as long as estimated where their weights come from memory
  // (measured on an H100 and an H200).
  constexpr double kPlain = 0.78, kEarly = 0.95, kActivated = 0.92, kOfFewRows = 1.05, kShort = 1.1;
  constexpr double kShortMicroseconds = 10.0;
  // The shorter k is, the larger a part of torch's way is the pointwise kernel (measured on an H200).
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

// True if a product of inference is estimated to take less time than torch's GEMM, with the pointwise kernel of an
// activation behind it. A gated one takes two of torch's.
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

// True if a product of inference is taken for the CPU's time that it saves.
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

// A choice that was made, with all that it rests on.
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

// Reduces the addresses of a problem to what a choice depends on: where in a line of memory each operand begins.
GemmProblem placed(GemmProblem p) {
  const auto place = [](auto*& data) {
    using Data = std::remove_reference_t<decltype(data)>;
    if (data != nullptr) data = reinterpret_cast<Data>(kLineBytes + reinterpret_cast<uintptr_t>(data) % kLineBytes);
  };
  TrainingMatrices& t = p.training;
  for (Matrix* matrix : {&p.a, &p.weight, &p.up_weight, &p.out, &t.second_a, &t.second_weight, &t.third_a,
                         &t.third_weight, &t.gate, &t.up, &t.gate_gradient, &t.up_gradient, &p.low_rank.rows,
                         &p.low_rank.weight, &p.low_rank.up_weight, &p.low_rank.factor}) {
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
  // A choice takes the CPU 3 us (H100 host), and a model asks for the same few again and again.
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
