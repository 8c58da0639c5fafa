#pragma once

#include <cstdint>

#include "../../torch-ext/operands/matrix.h"
#include "../quantized/codes.h"

// Layers of an MLP on few rows of x: the weights are read once, as they lie, and every element is multiplied with all
// rows while it is in a register.
namespace fused_mlp::few_rows {

// A weight [out, in], whose rows are of adjacent elements and row_stride elements apart, and a dense bias [out] or
// null. With `codes` the weight is quantised: these are decoded in the place of it.
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

// Rows of x as they are multiplied, in blocks, `stride` floats apart: fp32, or for dot products bf16, whose blocks take
// half of the place. For codes each block has the elements of even columns before those of odd ones, as bf16 always
// has.
struct Rows {
  float* data;
  int64_t stride;
  int64_t count;
  bool for_codes;
};

// The place of a hidden layer's values before the activation, for a backward: [rows, features], up of a gated one
// alone; nowhere where their data are null.
struct Kept {
  Matrix gate, up;
};

// The kernels of one instruction set. Arithmetic is in fp32, each result is rounded once. They work on blocks of
// features, of which a layer has one or more on either side. The last block of a number of features that is no
// multiple of `block` begins inside of the one before.
struct Kernels {
  int64_t block;
  // Brings rows of x into the order in which they are multiplied.
  void (*prepare)(DType dtype, Matrix x, int64_t features, Rows rows);
  // Computes the blocks [begin, end) of a layer's result: rows of `out`, or, where its data are null, of `next`, the
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
extern const few_rows::Kernels kFewRows;  // for bfloat16 alone
}
