#pragma once

#include <cstdint>

#include "../../torch-ext/operands/matrix.h"
#include "../../torch-ext/ops/norms/norm.h"

namespace fused_mlp {

struct PointwiseShape {
  DType dtype;
  int64_t rows;
  int64_t cols;
};

// The factor and the mean of each normalised row; null if not needed. Norms that are not centred have no means.
struct RowStatistics {
  float *scales = nullptr, *means = nullptr;
};

// The backward of a norm, whose weight all rows share, for rows from a given one. The gradient of a residual is added,
// if there is one. The sums for the gradients of weight and bias are accumulated, in an order of their own; they, and
// dx, may be null.
struct NormGradients {
  Matrix x, grad, residual_grad, dx;
  const float *scales, *means;
  float *weight_sums, *bias_sums;
};
constexpr int64_t kSumsStep = 64;  // memory for sums has a multiple of this

// The kernels of one instruction set. Arithmetic is in fp32, and each result is rounded once. An output may be one of
// the inputs. `activation` is a code of activation.h.
struct PointwiseKernels {
  // out = act(x)
  void (*act)(const PointwiseShape& shape, int64_t activation, Matrix x, Matrix out);
  // dx = grad * act'(x) and, if values.data is not null, values = act(x)
  void (*act_backward)(const PointwiseShape& shape, int64_t activation, Matrix grad, Matrix x, Matrix dx,
                       Matrix values);
  // out = act(gate) * up
  void (*act_and_mul)(const PointwiseShape& shape, int64_t activation, Matrix gate, Matrix up, Matrix out);
  // dgate = grad * up * act'(gate), dup = grad * act(gate) and, if values.data is not null, values = act(gate) * up
  void (*act_and_mul_backward)(const PointwiseShape& shape, int64_t activation, Matrix grad, Matrix gate, Matrix up,
                               Matrix dgate, Matrix dup, Matrix values);
  // out[c] = sum of x[r][c] over all rows r, of bfloat16
  void (*column_sums)(const PointwiseShape& shape, Matrix x, Matrix out);
  // norm.h defines what is computed for each row of x and of the residual. The first row here is row `first` of those
  // that the norm's features cover.
  void (*norm)(const PointwiseShape& shape, const Norm& norm, int64_t first, Matrix x, Matrix residual, Matrix out,
               RowStatistics statistics);
  void (*norm_gradients)(const PointwiseShape& shape, const Norm& norm, const NormGradients& rows);
  // out[c] = the sum of the sums that norm_gradients has made for column c, over as many parts as the shape has rows,
  // in the dtype of the shape, or in float32 if `wide`
  void (*norm_sums)(const PointwiseShape& shape, const float* sums, int64_t stride, bool wide, void* out);
};

// The table for the best instruction set that this CPU has.
const PointwiseKernels& pointwise();

namespace scalar {
extern const PointwiseKernels kPointwise;
}
namespace avx2 {
extern const PointwiseKernels kPointwise;
}
namespace avx512 {
extern const PointwiseKernels kPointwise;
}

}  // namespace fused_mlp
