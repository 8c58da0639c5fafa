// The kernels of quantised weights, and which of them computes a product.
#pragma once

#include <cuda_runtime_api.h>

#include "../../torch-ext/ops/plan.h"
#include "../gemm/gpu.h"
#include "problem.h"

namespace fused_mlp {

// The kernels of a few rows, of more, and of many, which round rows of a to e4m3.
enum class CodedLoop { kStreamed, kTiled, kScaled };

constexpr const char* name(CodedLoop loop) {
  constexpr const char* kNames[] = {"streamed", "tiled", "scaled"};
  return kNames[static_cast<int>(loop)];
}

struct CodedPlan {
  CodedLoop loop;
  int tokens;          // of a tile
  int groups;          // of a tile's weight rows: 64 for each warpgroup of a tiled kernel, 128 of a scaled one
  int split;           // parts of k; of few rows, the CTAs of a cluster
  CodedKernel kernel;  // of a streamed one
  int pair = 1;        // CTAs of a cluster that share weights, of a scaled one

  bool scaled() const { return loop == CodedLoop::kScaled; }
};

// Up to so many rows of a streamed kernels are the fastest, up to that many where there are no tiled ones; tiled ones
// up to the last. Weights are decoded before products of more rows (measured on an H200).
constexpr int64_t most_streamed_rows(Coding coding, bool gated) { return !in_bytes(coding) ? 32 : gated ? 8 : 16; }
constexpr int64_t most_tokens(Coding coding) { return in_bytes(coding) ? 32 : coding == Coding::kInt4Tiles ? 128 : 64; }
constexpr int64_t most_tiled_rows(Coding coding) { return in_bytes(coding) ? 384 : 512; }

// Up to so many rows of a are multiplied as they are, where scaled kernels take more: small weights have few tiles.
constexpr int64_t most_exact_rows(int64_t n, int64_t k) { return n * k < int64_t{1} << 25 ? 64 : 32; }

// Chooses a kernel, or says why none computes the product.
Refusal choose_coded(const CodedProblem& problem, const Gpu& gpu, CodedPlan* plan);

cudaError_t launch_coded_bf16(const CodedProblem& problem, const CodedPlan& plan, const Gpu& gpu, cudaStream_t stream);
cudaError_t launch_coded_fp16(const CodedProblem& problem, const CodedPlan& plan, const Gpu& gpu, cudaStream_t stream);
cudaError_t launch_coded_tiled(const CodedProblem& problem, const CodedPlan& plan, const Gpu& gpu, cudaStream_t stream);
cudaError_t launch_coded(const CodedProblem& problem, const CodedPlan& plan, const Gpu& gpu, cudaStream_t stream);

}  // namespace fused_mlp
