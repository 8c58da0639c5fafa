#pragma once

#include <cuda.h>

#include "../../torch-ext/operands/matrix.h"

namespace fused_mlp::sm90 {

// Describes a matrix [rows, cols] of 16-bit elements to the TMA, in boxes of box_rows x box_cols elements. In shared
// memory the rows of a box are swizzled over their whole width, which is 32, 64 or 128 bytes. Elements outside the
// matrix read as zero and are not written. Returns false if the driver refuses.
bool encode_tensor_map(CUtensorMap* map, DType dtype, const Matrix& matrix, int64_t rows, int64_t cols, int box_rows,
                       int box_cols);

// The same for a stack of matrices, whose first rows are `stack_rows` rows apart. A box lies in one of them.
struct MatrixStack {
  Matrix first;
  int64_t count, stack_rows;
};
bool encode_tensor_map(CUtensorMap* map, DType dtype, const MatrixStack& stack, int64_t rows, int64_t cols,
                       int box_rows, int box_cols);

}  // namespace fused_mlp::sm90
