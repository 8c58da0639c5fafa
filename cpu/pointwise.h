#pragma once

#include <cstdint>

#include "../torch-ext/matrix.h"
#include "../torch-ext/norm.h"

namespace fused_mlp {

struct PointwiseShape {
  DType dtype;
  int64_t rows;
  int64_t cols;
};

// The kernels of one instruction set. Arithmetic is in fp32, each result is rounded once. An output may be one of the
// inputs. `activation` is a code of activation.h.
struct PointwiseKernels {
  // out = act(x)
  void (*act)(const PointwiseShape& shape, int64_t activation, Matrix x, Matrix out);
  // dx = grad * act'(x) and, where values.data is not null, values = act(x)
  void (*act_backward)(const PointwiseShape& shape, int64_t activation, Matrix grad, Matrix x, Matrix dx,
                       Matrix values);
  // out = act(gate) * up
  void (*act_and_mul)(const PointwiseShape& shape, int64_t activation, Matrix gate, Matrix up, Matrix out);
  // dgate = grad * up * act'(gate), dup = grad * act(gate) and, where values.data is not null, values = act(gate) * up
  void (*act_and_mul_backward)(const PointwiseShape& shape, int64_t activation, Matrix grad, Matrix gate, Matrix up,
                               Matrix dgate, Matrix dup, Matrix values);
  // out[c] = sum of x[r][c] over all rows r, of bfloat16
  void (*column_sums)(const PointwiseShape& shape, Matrix x, Matrix out);
  // norm.h has what is computed of each row of x, and of the residual. The first of these is row `first` of those that
  // the norm's features are of.
  void (*norm)(const PointwiseShape& shape, const Norm& norm, int64_t first, Matrix x, Matrix residual, Matrix out);
};

// Those of the best instruction set that this CPU has.
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
