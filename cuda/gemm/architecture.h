// The GPU architectures that have GEMMs of their own. To add one, add a folder next to sm90 and a row in choice.cpp.
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
  std::span<const GemmKernel> kernels;  // in the order of the architecture's list
  // kNone if launch() supports the operands; otherwise the reason why not.
  Refusal (*refusal)(const GemmProblem& problem);
  // The kernel with the lowest estimated time. refusal() must have returned kNone for the problem.
  GemmPlan (*choose)(const GemmProblem& problem, const Gpu& gpu);
  // Launches on the current device.
  cudaError_t (*launch)(const GemmProblem& problem, const GemmPlan& plan, const Gpu& gpu, cudaStream_t stream);
  // These decide between the chosen kernel and torch's GEMM. Either estimates decide, which rest on measurements scaled
  // to this GPU: the time of torch's GEMM and the pointwise kernel after it, and the peak rates of the GPU. Or decide()
  // does, by a model of the GPU, with the same return values as choose_gemm(); measured() then tells whether the
  // model's constants come from such a GPU.
  double (*torch_microseconds)(const GemmProblem& problem, const Gpu& gpu);
  Peak (*peak)(const Gpu& gpu);
  Refusal (*decide)(const GemmProblem& problem, const Gpu& gpu, GemmPlan* plan);
  bool (*measured)(const Gpu& gpu);
  // A kernel to consider in addition to those of another architecture, which is the GPU's own. Its estimate is
  // comparable with theirs. Null if there is none.
  GemmPlan (*choose_beside)(const GemmProblem& problem, const Gpu& gpu);
  // The number of CTAs of a kernel for an adapter's few columns, or 0 if it does not support the operands; and its
  // launch. `starts_early`: it follows a kernel of ours. Null if there is none.
  int64_t (*rank_rows_ctas)(const RankRows& product);
  cudaError_t (*launch_rank_rows)(const RankRows& product, bool starts_early, cudaStream_t stream);
  const DroppedKernels* dropped;  // for adapters with dropout; null if there are none
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

// The architecture whose kernels compute the experts of a call in inference: the GPU's own, or one considered in
// addition; or null.
const Architecture* architecture_of_experts(const Gpu& gpu, const GroupedProblem& first);

// The first architecture that runs on a GPU and trains experts, or the one that a test forces; or null.
const Architecture* architecture_of_trained_experts(const Gpu& gpu);

// True if a test forces the architecture to compute experts, whatever a model says.
bool forces_experts();

// Returns kNone, with the plan in *plan, if a kernel should compute the product, of the GPU's own architecture or of
// one considered in addition; otherwise the reason why torch should.
Refusal choose_gemm(const Architecture& architecture, const GemmProblem& problem, const Gpu& gpu, GemmPlan* plan,
                    Launcher launcher);

// True if a plan rests on a model of a GPU that was never measured.
bool guesses(const GemmPlan& plan, const Gpu& gpu);
bool guesses(const Architecture& architecture, const Gpu& gpu);

}  // namespace fused_mlp
