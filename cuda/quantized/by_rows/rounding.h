// Rows in e4m3 with a scale each, as torch's products of scaled rows read them.
#pragma once

#include <cuda_runtime_api.h>

#include "../../../torch-ext/operands/matrix.h"

namespace fused_mlp {

constexpr int64_t kMostRoundedColumns = 65536;

// Rows of bfloat16, in whole 16-byte vectors, to be rounded: act(x), times up if that has data.
struct RowRounding {
  Matrix x, up;
  int64_t rows, columns;
  int64_t activation;
  uint8_t* data;  // [rows, columns]
  float* scales;  // [rows]
};

cudaError_t launch_row_rounding(const RowRounding& rounding, cudaStream_t stream);

}  // namespace fused_mlp
