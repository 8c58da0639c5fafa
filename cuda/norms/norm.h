#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../../torch-ext/operands/matrix.h"
#include "../../torch-ext/ops/norm.h"

namespace fused_mlp {

// norm.h has what is computed of the rows of x, and of those of the residual. out may be x itself. `statistics` is
// null, or memory for what norm_training.h has of each row. `sum` is null, or memory for the adjacent rows of the sum
// that is normed, which is rounded first then; it may be that of x.
struct NormRows {
  Matrix x, residual, out;
  int64_t rows, cols;
  DType dtype;
  Norm norm;
  bool overlaps;  // the kernel before, as far as that lets it
  float* statistics = nullptr;
  void* sum = nullptr;
};
cudaError_t launch_norm(const NormRows& rows, cudaStream_t stream);

// True if there is a kernel of CTAs that stay for such rows, which takes less time: many, each no longer than a CTA has
// threads for. It is launched in place of launch_norm's.
bool have_teams(const NormRows& rows);
cudaError_t launch_team_norm(const NormRows& rows, int multiprocessors, cudaStream_t stream);

// The backward of norm(x), all of whose rows share a weight: dx = dnorm + the gradient of the residual, if its data is
// not null. Where x was a sum with what came out of a dropout, `dropped` is its gradient: kept_scale dx where `kept`,
// torch's mask of adjacent rows, is not 0; then there is no gradient of the residual. With `sums`, memory for [parts,
// kinds_of_sums(), cols], each CTA stores its sums for the gradients of the weight, of the bias of a centred norm, and
// of a bias in front of the dropout.
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

// True if norms overlap the kernel before, on a GPU of this compute capability: where that was measured.
constexpr bool norms_overlap(int major) { return major == 9; }
// The most CTAs of a launch.
constexpr int64_t most_norm_ctas(int64_t rows) { return rows; }

}  // namespace fused_mlp
