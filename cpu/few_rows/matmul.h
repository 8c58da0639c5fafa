#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>

#include "../../torch-ext/operands/matrix.h"

// Matrix products by vector instructions, for cases in which torch's libraries are slow.
namespace fused_mlp::vectors {

// out [rows, cols] = a [rows, depth] b [depth, cols], or += if asked.
struct Product {
  DType dtype;
  const void* a;
  int64_t a_row_step, a_depth_step;
  // By rows, or, if it is a weight [cols, depth], by columns.
  Matrix b;
  bool by_columns;
  Matrix out;
  bool accumulate;
  int64_t rows, depth, cols;
};

// The kernels of one instruction set. They sum in float32 and round once, and work on blocks of columns, of which there
// is at least one. If the number of columns is not a multiple of `block`, the last block starts inside the one before.
struct Kernels {
  int64_t block;
  // The number of elements of scratch that multiply() needs for this many blocks.
  int64_t (*scratch_size)(const Product& product, int64_t blocks);
  // The rows [begin, end) of the result, in the blocks [first, last) of its columns.
  void (*multiply)(const Product& product, int64_t begin, int64_t end, int64_t first, int64_t last, float* scratch);
};

// True if matmul() supports these matrices and is faster than torch's library, by measurement. For a layer, a is x,
// with this many rows, and b its weight [cols, depth], transposed. For a backward, a is [rows, depth], or transposed,
// [depth, rows].
bool takes_layer(DType dtype, int64_t rows, const torch::stable::Tensor& weight);
bool takes_backward(DType dtype, int64_t rows, int64_t cols);
bool takes_matmul(const torch::stable::Tensor& a, const torch::stable::Tensor& b);

// out [m, n] = a [m, k] b [k, n], or += if asked. The elements of a row of `out` are adjacent.
void matmul(const torch::stable::Tensor& out, const torch::stable::Tensor& a, const torch::stable::Tensor& b,
            bool accumulate);

}  // namespace fused_mlp::vectors

namespace fused_mlp::avx2 {
extern const vectors::Kernels kProducts;
}
namespace fused_mlp::avx512 {
extern const vectors::Kernels kProducts;
}
