// The GPU architectures that have GEMMs of their own. A new one is a folder beside sm90 and a row in choice.cpp.
#pragma once

#include <cuda_runtime_api.h>

#include <span>

#include "../../torch-ext/ops/plan.h"
#include "dropped.h"
#include "experts.h"
#include "gpu.h"
#include "problem.h"

namespace fused_mlp {

struct Architecture {
  const char* name;
  bool (*runs_on)(const Gpu& gpu);
  std::span<const GemmKernel> kernels;  // in the order of its list
  // kNone where launch() takes the operands; otherwise the reason why not.
  Refusal (*refusal)(const GemmProblem& problem);
  // The kernel that is estimated to take the least time. The problem is one that refusal() does not refuse.
  GemmPlan (*choose)(const GemmProblem& problem, const Gpu& gpu);
  // Launches on the current device.
  cudaError_t (*launch)(const GemmProblem& problem, const GemmPlan& plan, const Gpu& gpu, cudaStream_t stream);
  // These decide between the kernel chosen and torch's GEMM: estimates by what was measured, carried over to this GPU,
  // of torch's GEMM with the pointwise kernel behind it, and what the GPU reaches at most; or decide(), which answers
  // as choose_gemm() does, by a model of the GPU, and measured(), whether the model's constants are of such a GPU.
  double (*torch_microseconds)(const GemmProblem& problem, const Gpu& gpu);
  Peak (*peak)(const Gpu& gpu);
  Refusal (*decide)(const GemmProblem& problem, const Gpu& gpu, GemmPlan* plan);
  bool (*measured)(const Gpu& gpu);
  // The kernel that is to be considered beside those of another architecture, which is the GPU's own, by an estimate
  // that may be compared with theirs. Null where there are none such.
  GemmPlan (*choose_beside)(const GemmProblem& problem, const Gpu& gpu);
  // The CTAs of a kernel for the few columns of an adapter, or 0 where it does not take the operands, and its launch:
  // `starts_early` behind a kernel of ours. Null where there are none such.
  int64_t (*rank_rows_ctas)(const RankRows& product);
  cudaError_t (*launch_rank_rows)(const RankRows& product, bool starts_early, cudaStream_t stream);
  const DroppedKernels* dropped;  // those of adapters behind a dropout; null where there are none
  const GroupedKernels* grouped;  // products of the experts of a mixture
};

namespace sm80 {
extern const Architecture kArchitecture;
}
namespace sm90 {
extern const Architecture kArchitecture;
}

// The architecture that is a GPU's own, or null.
const Architecture* architecture_of(const Gpu& gpu);

// The one whose kernels compute the experts of a call in inference: a GPU's own, or one beside it; or null.
const Architecture* architecture_of_experts(const Gpu& gpu, const GroupedProblem& first);

// The first that runs on a GPU and trains experts, or the one that a test forces; or null.
const Architecture* architecture_of_trained_experts(const Gpu& gpu);

// True if experts are to be the architecture's whatever a model says: a test forces them.
bool forces_experts();

// kNone, with the plan in *plan, where a kernel of the architecture, which is the GPU's own, or of one considered
// beside it, is to compute the product; else why torch is to.
Refusal choose_gemm(const Architecture& architecture, const GemmProblem& problem, const Gpu& gpu, GemmPlan* plan,
                    Launcher launcher);

// True if a plan rests on a model of a GPU that nobody has measured.
bool guesses(const GemmPlan& plan, const Gpu& gpu);
bool guesses(const Architecture& architecture, const Gpu& gpu);

}  // namespace fused_mlp
