#pragma once

#include <cuda_runtime_api.h>

#include "../../../torch-ext/operands/matrix.h"

namespace fused_mlp {

// Copies a matrix of two-byte elements into another of a different size. Elements missing in `from` become 0, and
// elements outside `to` are dropped.
struct RowsCopy {
  Matrix from;
  int64_t from_rows, from_columns;
  Matrix to;
  int64_t rows, columns;
};
cudaError_t launch_copy_rows(const RowsCopy& copy, cudaStream_t stream);

}  // namespace fused_mlp
