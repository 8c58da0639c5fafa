#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../torch-ext/matrix.h"
#include "../torch-ext/norm.h"

namespace fused_mlp {

// norm.h has what is computed of the rows of x, and of those of the residual. out may be x itself.
struct NormRows {
  Matrix x, residual, out;
  int64_t rows, cols;
  DType dtype;
  Norm norm;
  bool overlaps;  // the kernel before, as far as that lets it
};
cudaError_t launch_norm(const NormRows& rows, cudaStream_t stream);

// True if norms overlap the kernel before, on a GPU of this compute capability: where that was measured.
constexpr bool norms_overlap(int major) { return major == 9; }
// The most CTAs of a launch.
constexpr int64_t most_norm_ctas(int64_t rows) { return rows; }

}  // namespace fused_mlp
