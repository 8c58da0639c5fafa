// The starts of a matrix's rows, and the shared memory that a CTA may have on the architecture being compiled for.
#pragma once

#include "../../torch-ext/operands/matrix.h"
#include "shape.h"

namespace fused_mlp::sm80 {

// Rows past the end read the last row: results computed from them are not stored.
template <typename Element>
__device__ __forceinline__ const Element* row_of(const Matrix& matrix, int row, int rows) {
  return static_cast<const Element*>(matrix.data) + min(row, rows - 1) * matrix.row_stride;
}

// A kernel that needs more is left out. plan.h knows for which GPUs it is compiled.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
constexpr int kSharedLimit = kLeastSharedOfCta;
#else
constexpr int kSharedLimit = 163 * 1024;
#endif

}  // namespace fused_mlp::sm80
