#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>

#include "../../torch-ext/operands/matrix.h"

// Products of matrices by vector instructions, for those that torch's libraries are slow with.
namespace fused_mlp::vectors {

// out [rows, cols] = a [rows, depth] b [depth, cols], added to what `out` holds if asked.
struct Product {
  DType dtype;
  const void* a;
  int64_t a_row_step, a_depth_step;
  // By rows, or, where they are those of a weight [cols, depth], by columns.
  Matrix b;
  bool by_columns;
  Matrix out;
  bool accumulate;
  int64_t rows, depth, cols;
};

// The kernels of one instruction set. They sum in float32 and round once, and work on blocks of columns, of which there
// is one at least. The last block of a number of columns that is no multiple of `block` begins inside of the one
// before.
struct Kernels {
  int64_t block;
  // The number of elements of scratch that multiply() needs for so many blocks.
  int64_t (*scratch_size)(const Product& product, int64_t blocks);
  // The rows [begin, end) of the result, in the blocks [first, last) of its columns.
  void (*multiply)(const Product& product, int64_t begin, int64_t end, int64_t first, int64_t last, float* scratch);
};

// True if matmul() takes these matrices and is faster than torch's library, by measurement. Of a layer, a is x, of so
// many rows, and b its weight [cols, depth], transposed; of a backward, a is [rows, depth], or transposed, [depth,
// rows].
bool takes_layer(DType dtype, int64_t rows, const torch::stable::Tensor& weight);
bool takes_backward(DType dtype, int64_t rows, int64_t cols);
bool takes_matmul(const torch::stable::Tensor& a, const torch::stable::Tensor& b);

// out [m, n] = a [m, k] b [k, n], added to what `out` holds if asked. The elements of a row of `out` are adjacent.
void matmul(const torch::stable::Tensor& out, const torch::stable::Tensor& a, const torch::stable::Tensor& b,
            bool accumulate);

}  // namespace fused_mlp::vectors

namespace fused_mlp::avx2 {
extern const vectors::Kernels kProducts;
}
namespace fused_mlp::avx512 {
extern const vectors::Kernels kProducts;
}
