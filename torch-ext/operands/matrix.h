#pragma once

#include <cstdint>

// The operands of the kernels of every backend.
namespace fused_mlp {

enum class DType { kFloat32, kFloat16, kBFloat16 };

constexpr int64_t element_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Rows of adjacent elements, `row_stride` elements apart.
struct Matrix {
  void* data;
  int64_t row_stride;

  bool operator==(const Matrix&) const = default;
};
inline constexpr Matrix kNoMatrix{nullptr, 0};

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace fused_mlp
