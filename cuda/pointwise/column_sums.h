#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../../torch-ext/operands/matrix.h"

namespace fused_mlp {

// If there are few columns and many rows, the rows are summed in parts, and then the sums of the parts.
int64_t parts_of_column_sums(int64_t rows, int64_t cols, int multiprocessors);

// out[c] = sum of x[r][c] over all rows r, added in float32: the gradient of a bias. With more than one part, `partial`
// is memory for float32 [parts, cols].
cudaError_t launch_column_sums(Matrix x, int64_t rows, int64_t cols, DType dtype, void* out, DType out_dtype,
                               float* partial, int64_t parts, cudaStream_t stream);

// The same for adjacent float32 rows, [rows, groups, cols]; each group of columns has a target, or null.
constexpr int kMostSumGroups = 3;
struct SumTargets {
  void* of[kMostSumGroups];
  DType dtypes[kMostSumGroups];
};
cudaError_t launch_grouped_sums(float* x, int64_t rows, int64_t cols, int64_t groups, const SumTargets& targets,
                                cudaStream_t stream);

// The same for up to that many matrices with this number of rows and the same dtype, in one launch; a matrix without
// columns is skipped.
struct SumSources {
  struct {
    Matrix x;
    int64_t cols;
    void* out;
  } of[kMostSumGroups];
};
cudaError_t launch_joint_sums(const SumSources& sources, int64_t rows, DType dtype, cudaStream_t stream);

}  // namespace fused_mlp
