// GEMMs for sm_90a (H100, H200) with bias, activation and gating in the epilogue.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../../torch-ext/activation.h"
#include "../pointwise.h"

namespace fused_mlp::sm90 {

// out = act(a weight^T + bias), or, where up_weight.data is not null,
// out = act(a weight^T + bias) * (a up_weight^T + up_bias).
// a [m, k], weights [n, k], biases [n] or null, out [m, n]; fp32 accumulation, one rounding.
struct GemmProblem {
  Matrix a;
  Matrix weight;
  Matrix up_weight;
  const void* bias;
  const void* up_bias;
  Matrix out;
  int64_t m;
  int64_t n;
  int64_t k;
  DType dtype;
  int64_t activation;
  // Set where the launch before this one in the stream is a GEMM of this file that did not write the weights: this
  // one may then start, and read its weights, while that one drains.
  bool follows_gemm;

  bool gated() const { return up_weight.data != nullptr; }
  bool linear() const { return activation == static_cast<int64_t>(Activation::kLinear); }
};

// How a problem is computed: which kernel, over how many CTAs, and why.
struct GemmPlan {
  enum class Kernel { kTiled, kStreamed };
  Kernel kernel;
  int block_m;          // rows of a that a CTA multiplies at a time
  int block_n;          // weight rows, likewise
  bool ping_pong;       // the warpgroups of a CTA take a tile each in turn, not half a tile each
  int split_k;          // CTAs of a cluster that share one output tile, each with a part of k
  double microseconds;  // estimated
  const char* reason;
};

// Null where gemm() takes the problem, else the reason, in a few words, why it does not.
const char* refusal(const GemmProblem& problem);

GemmPlan plan(const GemmProblem& problem, int multiprocessors);

// Null, with the plan in *plan, where gemm() is to be taken; else where torch's GEMM with a pointwise kernel behind it
// is faster. The time of a call is the GPU's or the CPU's, whichever is longer.
const char* choose(const GemmProblem& problem, int multiprocessors, GemmPlan* plan);

constexpr int64_t kTiledRows = 33;  // tiled kernels from here on: for fewer, their tiles are mostly empty

// Of a streamed kernel with tiles of so many rows, on a multiprocessor at once.
constexpr int streamed_ctas(int rows) { return rows < 32 ? 3 : 2; }

// Of those there are: groups of multiprocessors do not divide evenly into larger clusters.
inline int usable_multiprocessors(int multiprocessors, int cluster) {
  return cluster <= 2 ? multiprocessors : multiprocessors * 10 / 11;
}

// Launches on the current device. The problem must be one that refusal() does not refuse.
cudaError_t gemm(const GemmProblem& problem, const GemmPlan& plan, int multiprocessors, cudaStream_t stream);

}  // namespace fused_mlp::sm90
