#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../../torch-ext/operands/matrix.h"

namespace fused_mlp {

constexpr int kMaxRoutedExperts = 512;
constexpr int kMaxChosen = 32;

// The experts that tokens choose by the logits [tokens, experts]: those of the largest softmax, of equal ones the
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

cudaError_t launch_choice(const Choice& choice, cudaStream_t stream);

}  // namespace fused_mlp
