#pragma once

#include <cuda.h>

#include "../../torch-ext/matrix.h"

namespace fused_mlp::sm90 {

// Describes matrix [rows, cols] to the TMA, cut in boxes of box_rows x box_cols elements whose rows are swizzled in
// shared memory over their whole width (at most 128 bytes). What lies outside the matrix reads as zero and is not
// written. False where the driver refuses.
bool encode_tensor_map(CUtensorMap* map, DType dtype, const Matrix& matrix, int64_t rows, int64_t cols, int box_rows,
                       int box_cols);

}  // namespace fused_mlp::sm90
