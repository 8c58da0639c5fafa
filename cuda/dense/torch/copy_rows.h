#pragma once

#include <cuda_runtime_api.h>

#include "../../../torch-ext/operands/matrix.h"

namespace fused_mlp {

// Copies a matrix of elements of two bytes into another of other sizes. What `from` does not have becomes 0, what `to`
// does not have is left out.
struct RowsCopy {
  Matrix from;
  int64_t from_rows, from_columns;
  Matrix to;
  int64_t rows, columns;
};
cudaError_t launch_copy_rows(const RowsCopy& copy, cudaStream_t stream);

}  // namespace fused_mlp
