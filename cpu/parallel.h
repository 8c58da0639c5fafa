// Calls of the pointwise kernels by the ops.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "../torch-ext/torch_binding.h"
#include "pointwise/pointwise.h"

namespace fused_mlp {

inline DType dtype_of(const Tensor& tensor, const char* name) {
  using torch::headeronly::ScalarType;
  const ScalarType dtype = tensor.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::BFloat16, name,
                  " must be float32 or bfloat16 on the CPU, not ", torch::headeronly::toString(dtype));
  return dtype == ScalarType::Float ? DType::kFloat32 : DType::kBFloat16;
}

constexpr int64_t kGrain = 16384;  // minimum number of elements per thread

// The matrix from a given row.
inline Matrix from_row(const Matrix& m, int64_t row, DType dtype) {
  return {static_cast<char*>(m.data) + row * m.row_stride * element_bytes(dtype), m.row_stride};
}

// The matrix from a given column; kNoMatrix has none.
inline Matrix from_column(const Matrix& m, int64_t col, DType dtype) {
  return m.data == nullptr ? m : Matrix{static_cast<char*>(m.data) + col * element_bytes(dtype), m.row_stride};
}

// Calls body(shape, operands...) for parts of matrices whose elements correspond, in parallel; kNoMatrix has no parts.
template <typename Body, typename... Operands>
void for_parts(PointwiseShape shape, const Body& body, Operands... operands) {
  if (shape.rows == 0 || shape.cols == 0) return;
  if (((operands.data == nullptr || operands.row_stride == shape.cols) && ...)) {  // one long row: cut anywhere
    torch::stable::parallel_for(0, shape.rows * shape.cols, kGrain, [&](int64_t begin, int64_t end) {
      body(PointwiseShape{shape.dtype, 1, end - begin}, from_column(operands, begin, shape.dtype)...);
    });
  } else {
    torch::stable::parallel_for(0, shape.rows, ceil_div(kGrain, shape.cols), [&](int64_t begin, int64_t end) {
      body(PointwiseShape{shape.dtype, end - begin, shape.cols}, from_row(operands, begin, shape.dtype)...);
    });
  }
}

}  // namespace fused_mlp
