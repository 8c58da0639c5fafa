#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../torch-ext/matrix.h"
#include "../torch-ext/norm.h"

namespace fused_mlp {

// norm.h has what is computed of the rows of x, and of those of the residual. out may be x itself. `statistics` is
// null, or memory for what norm_training.h has of each row.
struct NormRows {
  Matrix x, residual, out;
  int64_t rows, cols;
  DType dtype;
  Norm norm;
  bool overlaps;  // the kernel before, as far as that lets it
  float* statistics = nullptr;
};
cudaError_t launch_norm(const NormRows& rows, cudaStream_t stream);

// Whether there is a kernel of CTAs that stay for such rows, which takes less time: many, each no longer than a CTA has
// threads for. It is launched in place of launch_norm's.
bool have_teams(const NormRows& rows);
cudaError_t launch_team_norm(const NormRows& rows, int multiprocessors, cudaStream_t stream);

// The backward of norm(x), all of whose rows share a weight: dx = dnorm + the gradient of the residual, if its data is
// not null. With `sums`, memory for [parts, cols], or [parts, 2, cols] of a centred norm, each CTA stores its sums for
// the gradients of the weight and the bias.
struct NormGradients {
  Matrix x, grad, residual_grad, dx;
  int64_t rows, cols;
  DType dtype;
  Norm norm;
  const float* statistics;
  float* sums;
};
// How many CTAs there will be.
int64_t parts_of_norm_gradients(const NormGradients& rows, int multiprocessors);
cudaError_t launch_norm_gradients(const NormGradients& rows, int64_t parts, cudaStream_t stream);

// True if norms overlap the kernel before, on a GPU of this compute capability: where that was measured.
constexpr bool norms_overlap(int major) { return major == 9; }
// The most CTAs of a launch.
constexpr int64_t most_norm_ctas(int64_t rows) { return rows; }

}  // namespace fused_mlp
