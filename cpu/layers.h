// The layers of an MLP on a CPU. The GEMMs run on blocks of rows that are small enough to stay in cache, with the
// pointwise kernels between them. With AMX, our own kernels use tiles; with few rows, kernels read the weights once.
#pragma once

#include <optional>

#include "../torch-ext/calls/direct/plain.h"
#include "../torch-ext/operands/activation.h"
#include "../torch-ext/ops/plan.h"
#include "../torch-ext/torch_binding.h"
#include "parallel.h"
#include "pointwise/pointwise.h"

namespace fused_mlp {

// Applies kernel(shape, activation, operands...) to all the elements, in parallel.
template <typename Kernel, typename... Operands>
void run_pointwise(const Kernel& kernel, PointwiseShape shape, int64_t activation, Operands... operands) {
  for_parts(shape, [&](const PointwiseShape& part, auto... rows) { kernel(part, activation, rows...); }, operands...);
}

// The number of rows of [..., cols].
int64_t count_rows(const Tensor& x);

// [..., cols] as [rows, cols], a view if the strides permit one.
Tensor flatten_rows(const Tensor& x);

// A dense tensor with the leading dimensions of x. Ops return it instead of a view, because under autograd a view could
// not be changed in place.
Tensor new_result(const Tensor& x, int64_t features);

// Such a tensor as a matrix.
Tensor matrix_of(const Tensor& result, int64_t rows);

// x [..., in] as a matrix that torch's GEMMs can read: oneDNN's for bf16 may read past the end of a row, and there may
// be NaN between strided rows.
Tensor gemm_rows(const Tensor& flat);

// out (+)= a b
void multiply(const Tensor& out, const Tensor& a, const Tensor& b, bool accumulate);

// act(x weight^T + bias), times (x up_weight^T + up_bias) for a gated one.
struct HiddenLayer {
  const Tensor& weight;
  const OptionalTensor& bias;
  const Tensor* up_weight;
  const OptionalTensor* up_bias;
  int64_t activation;

  bool gated() const { return up_weight != nullptr; }
  int64_t features() const { return weight.size(0); }
};

struct OutputLayer {
  const Tensor& weight;
  const OptionalTensor& bias;

  int64_t features() const { return weight.size(0); }
};

// Values that the backward of a hidden layer needs, [rows, features]: gate before its activation, and up if any. With
// `up_first`, `gate` is [rows, 2 * features] and holds both.
struct Kept {
  Tensor gate, up;
  std::optional<bool> up_first;
};

// The reason why AMX does not support these layers. It supports both or neither: the hidden values never leave its
// tiles.
Refusal tiles_refusal(const Tensor& x, const HiddenLayer& hidden, const OutputLayer* output);

// True if the kernels for few rows are used for these layers. `keeps`: a backward follows.
bool takes_few_rows(const Tensor& x, int64_t rows, const HiddenLayer& hidden, const OutputLayer* output, bool keeps);

// Runs both layers, or, without `output`, the hidden one, for x [rows, in], on AMX tiles or by torch's GEMMs.
void run_products(const Tensor& x, const HiddenLayer& hidden, const OutputLayer* output, const Tensor& out,
                  const Kept* kept = nullptr);

// Runs both layers, or, without `output`, the hidden one, for x [rows, in], by the kernels for few rows if they pay.
void run_rows(const Tensor& x, const HiddenLayer& hidden, const OutputLayer* output, const Tensor& out,
              const Kept* kept = nullptr);

// Runs both layers for x [..., in], or, without `output`, the hidden one.
Tensor run_layers(const Tensor& x, const HiddenLayer& hidden, const OutputLayer* output);

// Computes the layers of an MLP with quantised weights for these rows; the rows of the result are adjacent.
void run_packed(const PlainMlp& mlp, const Matrix& x, void* out);

}  // namespace fused_mlp
