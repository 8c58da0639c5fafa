#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../../torch-ext/operands/matrix.h"

namespace fused_mlp {

constexpr int kMaxRoutedExperts = 512;
constexpr int kMaxChosen = 32;

// The experts that tokens choose by the logits [tokens, experts]: those with the largest softmax; of equal ones the
// first.
struct Choice {
  const void* logits;
  int64_t tokens;
  int experts, chosen;
  bool normalized;  // true if the weights of a token add up to 1
  DType dtype;      // the dtype of logits
  bool narrow;      // true if weights are of that dtype, and not float32
  void* weights;    // [tokens, chosen], the largest first
  int64_t* index;
};

// The logits [tokens, experts] in float32, from 16-bit operands whose rows are aligned to 16 bytes.
struct RouterLogits {
  Matrix x, weight;
  int64_t tokens, k;  // k is a multiple of 8
  int experts;
  DType dtype;
  float* logits;
};
constexpr int64_t kMostStreamedTokens = 64;  // with more, a GEMM reads the weight less often

constexpr int kMaxGroups = 32;

// The experts that tokens choose by sigmoids of the logits [tokens, experts]. Of the `top_groups` groups with the
// largest sums of their two largest scores, the experts with the largest sigmoid plus bias are chosen; of equal ones
// the first. Their weights are the sigmoids, which with `normalized` add up to 1, times `scaling`.
struct SigmoidChoice {
  const float *logits, *bias;
  int64_t tokens;
  int experts, chosen, groups, top_groups;
  bool normalized;
  float scaling;
  float* weights;  // [tokens, chosen]
  int64_t* index;
};

cudaError_t launch_logits(const RouterLogits& logits, cudaStream_t stream);
cudaError_t launch_sigmoid_choice(const SigmoidChoice& choice, cudaStream_t stream);

cudaError_t launch_choice(const Choice& choice, cudaStream_t stream);

}  // namespace fused_mlp
