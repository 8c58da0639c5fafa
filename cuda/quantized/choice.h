// The kernels of quantised weights, and which of them computes a product.
#pragma once

#include <cuda_runtime_api.h>

#include "../../torch-ext/plan.h"
#include "../gemm/gpu.h"
#include "problem.h"

namespace fused_mlp {

struct CodedPlan {
  MainLoop loop;
  int tokens;          // of a tile
  int split;           // CTAs of a cluster, which share k
  CodedKernel kernel;  // of a streamed one
};

// Up to so many rows of a streamed kernels are the fastest, and up to so many tiled ones. Weights are decoded before
// products of more rows (measured on an H200). Where there are no tiled ones, streamed ones take kMostTokens.
struct RowLimits {
  int64_t streamed, tiled;
};
constexpr RowLimits row_limits(Coding coding) {
  return coding == Coding::kFp8 ? RowLimits{16, 512} : RowLimits{32, 512};
}
constexpr int64_t kMostTokens = 64;

// Chooses a kernel, or says why none computes the product.
Refusal choose_coded(const CodedProblem& problem, const Gpu& gpu, CodedPlan* plan);

cudaError_t launch_coded_bf16(const CodedProblem& problem, const CodedPlan& plan, const Gpu& gpu, cudaStream_t stream);
cudaError_t launch_coded_fp16(const CodedProblem& problem, const CodedPlan& plan, const Gpu& gpu, cudaStream_t stream);
cudaError_t launch_coded_tiled(const CodedProblem& problem, const CodedPlan& plan, const Gpu& gpu, cudaStream_t stream);
cudaError_t launch_coded(const CodedProblem& problem, const CodedPlan& plan, const Gpu& gpu, cudaStream_t stream);

}  // namespace fused_mlp
