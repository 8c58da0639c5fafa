#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../../torch-ext/operands/matrix.h"
#include "../../torch-ext/ops/norms/norm.h"

namespace fused_mlp {

// norm.h defines what is computed for the rows of x and of the residual. `out` may be x itself. `statistics` is null,
// or memory for each row's statistics (norm_training.h). `sum` is null, or memory for adjacent rows of the sum that is
// normalised; the sum is then rounded first. It may be the memory of x.
struct NormRows {
  Matrix x, residual, out;
  int64_t rows, cols;
  DType dtype;
  Norm norm;
  bool overlaps;  // overlaps the previous kernel, as far as that one allows
  float* statistics = nullptr;
  void* sum = nullptr;
};
cudaError_t launch_norm(const NormRows& rows, cudaStream_t stream);

// True if a kernel of persistent CTAs supports these rows and takes less time: many rows, none longer than a CTA's
// threads can hold. It is launched instead of launch_norm's.
bool have_teams(const NormRows& rows);
cudaError_t launch_team_norm(const NormRows& rows, int multiprocessors, cudaStream_t stream);

// The backward of norm(x), all of whose rows share a weight: dx = dnorm + the gradient of the residual, if its data is
// not null. If x was a sum with the output of a dropout, `dropped` receives the gradient of the dropout's input:
// kept_scale dx where `kept`, torch's mask of adjacent rows, is not 0; then there is no gradient of the residual. With
// `sums`, memory for [parts, kinds_of_sums(), cols], each CTA stores its sums for the gradients of the weight, of the
// bias of a centred norm, and of a bias before the dropout.
struct NormGradients {
  Matrix x, grad, residual_grad, dx, dropped;
  int64_t rows, cols;
  DType dtype;
  Norm norm;
  const float* statistics;
  const uint8_t* kept;
  float kept_scale;
  bool sums_dropped;
  float* sums;

  constexpr bool is_behind() const { return kept != nullptr || sums_dropped; }
  constexpr int64_t kinds_of_sums() const { return 1 + norm.centred() + is_behind(); }
};
// The number of CTAs.
int64_t parts_of_norm_gradients(const NormGradients& rows, int multiprocessors);
cudaError_t launch_norm_gradients(const NormGradients& rows, int64_t parts, cudaStream_t stream);

// True if norms overlap the previous kernel on a GPU of this compute capability; only where that was measured.
constexpr bool norms_overlap(int major) { return major == 9; }
// The maximum number of CTAs of a launch.
constexpr int64_t most_norm_ctas(int64_t rows) { return rows; }

}  // namespace fused_mlp
