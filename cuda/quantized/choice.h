// The kernels for quantised weights, and the choice among them.
#pragma once

#include <cuda_runtime_api.h>

#include "../../torch-ext/ops/plan.h"
#include "../gemm/gpu.h"
#include "problem.h"

namespace fused_mlp {

// The kernels for few rows, for more, and for many, and torch's product; the last two round rows of a to e4m3.
enum class CodedLoop { kStreamed, kTiled, kScaled, kScaledMm };

constexpr const char* name(CodedLoop loop) {
  constexpr const char* kNames[] = {"streamed", "tiled", "scaled", "scaled_mm"};
  return kNames[static_cast<int>(loop)];
}

struct CodedPlan {
  CodedLoop loop;
  int tokens;          // of a tile
  int groups;          // groups of weight rows in a tile: 64 per warpgroup of a tiled kernel, 128 in a scaled one
  int split;           // parts of k; with few rows, the CTAs of a cluster
  CodedKernel kernel;  // of a streamed plan
  int pair = 1;        // CTAs of a cluster that share weights, in a scaled plan

  bool reads_codes() const { return loop == CodedLoop::kStreamed || loop == CodedLoop::kTiled; }
};

// The largest numbers of rows of a for which streamed kernels are fastest, for which they are used if there are no
// tiled ones, and for which tiled ones are used. With more rows, weights are decoded before the products (measured on
// an H200).
constexpr int64_t most_streamed_rows(Coding coding, bool gated) { return !in_bytes(coding) ? 32 : gated ? 8 : 16; }
constexpr int64_t most_tokens(Coding coding) { return in_bytes(coding) ? 32 : coding == Coding::kInt4Tiles ? 128 : 64; }
constexpr int64_t most_tiled_rows(Coding coding) { return in_bytes(coding) ? 384 : 512; }

// The largest number of rows of a that are not rounded if scaled kernels support more: small weights have few tiles.
constexpr int64_t most_exact_rows(int64_t n, int64_t k) { return n * k < int64_t{1} << 25 ? 64 : 32; }

// The largest number of rows of a that scaled kernels multiply by weights with a scale per row: torch's product takes
// less time for more (measured on an H200).
constexpr int64_t kMostScaledByRows = 128;

// Chooses a kernel, or returns the reason why none computes the product.
Refusal choose_coded(const CodedProblem& problem, const Gpu& gpu, CodedPlan* plan);

cudaError_t launch_coded_bf16(const CodedProblem& problem, const CodedPlan& plan, const Gpu& gpu, cudaStream_t stream);
cudaError_t launch_coded_fp16(const CodedProblem& problem, const CodedPlan& plan, const Gpu& gpu, cudaStream_t stream);
cudaError_t launch_coded_tiled(const CodedProblem& problem, const CodedPlan& plan, const Gpu& gpu, cudaStream_t stream);
cudaError_t launch_coded(const CodedProblem& problem, const CodedPlan& plan, const Gpu& gpu, cudaStream_t stream);

}  // namespace fused_mlp
