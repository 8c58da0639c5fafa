#pragma once

#include <cstdint>

#include "../../torch-ext/operands/matrix.h"
#include "../quantized/codes.h"

// Layers of an MLP on few rows of x. The weights are read once, in their own layout, and every element is multiplied
// with all rows while it is in a register.
namespace fused_mlp::few_rows {

// A weight [out, in], whose rows are contiguous and row_stride elements apart, and a dense bias [out] or null. With
// `codes` the weight is quantised, and these are decoded instead.
struct Projection {
  const void* weight;
  int64_t row_stride;
  const void* bias;
  const quantized::Codes* codes = nullptr;
};

// act(x weight^T + bias), times (x up_weight^T + up_bias) if gated.
struct Layer {
  DType dtype;
  Projection gate, up;
  bool gated;
  int64_t in_features, out_features;
  int64_t activation;
};

// The number of rows of x that have sums in registers at once.
constexpr int64_t kRowsAtOnce = 8;

// Rows of x as they are multiplied, in blocks, `stride` floats apart: fp32, or bf16 for dot products, whose blocks take
// half of the space. For codes each block has the elements of even columns before those of odd ones; bf16 always has
// this order.
struct Rows {
  float* data;
  int64_t stride;
  int64_t count;
  bool for_codes;
};

// Where to store a hidden layer's values before the activation for a backward: [rows, features], `up` only if gated.
// Null data: nowhere.
struct Kept {
  Matrix gate, up;
};

// The kernels of one instruction set. Arithmetic is in fp32, and each result is rounded once. They work on blocks of
// features; a layer has at least one block on either side. If the number of features is not a multiple of `block`, the
// last block starts inside the one before.
struct Kernels {
  int64_t block;
  // Puts rows of x in the order in which they are multiplied.
  void (*prepare)(DType dtype, Matrix x, int64_t features, Rows rows);
  // Computes the blocks [begin, end) of a layer's result into rows of `out`, or, if its data are null, of `next`, the
  // prepared rows of the next layer.
  void (*project)(const Layer& layer, Rows rows, int64_t begin, int64_t end, Matrix out, Rows next, Kept kept);
};

}  // namespace fused_mlp::few_rows

namespace fused_mlp::avx2 {
extern const few_rows::Kernels kFewRows;
}
namespace fused_mlp::avx512 {
extern const few_rows::Kernels kFewRows;
}
namespace fused_mlp::avx512_bf16 {
extern const few_rows::Kernels kFewRows;  // for bfloat16 only
}
