#pragma once

#include <cstdint>

namespace fused_mlp {

enum class Dtype { kFloat32, kBFloat16 };

// `rows` rows of `cols` elements; consecutive rows of an operand are its own row_stride elements apart.
struct Rows {
  void* data;
  int64_t row_stride;
};

struct PointwiseShape {
  Dtype dtype;
  int64_t rows;
  int64_t cols;
};

// The kernels of one instruction set. Arithmetic is in fp32, each result is rounded once. An output may be one of the
// inputs. `activation` is a code of activation.h.
struct PointwiseKernels {
  // out = act(x)
  void (*act)(const PointwiseShape& shape, int64_t activation, Rows x, Rows out);
  // out = act(gate) * up
  void (*act_and_mul)(const PointwiseShape& shape, int64_t activation, Rows gate, Rows up, Rows out);
  // dgate = grad * up * act'(gate), dup = grad * act(gate)
  void (*act_and_mul_backward)(const PointwiseShape& shape, int64_t activation, Rows grad, Rows gate, Rows up,
                               Rows dgate, Rows dup);
};

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
