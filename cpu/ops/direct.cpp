// MLPs and their blocks on few rows, without tensors.
#include <memory>
#include <optional>

#include "../../torch-ext/calls/direct/plain.h"
#include "../few_rows/few_rows_mlp.h"
#include "../layers.h"
#include "norms.h"

namespace fused_mlp {
namespace {

few_rows::Layer layer_of(const PlainMlp& mlp, int number) {
  const PlainLayer& layer = mlp.layers[number];
  const int64_t in = number == 0 ? mlp.in : mlp.layers[number - 1].out;
  return {mlp.dtype,
          {layer.weight.data, layer.weight.row_stride, layer.bias},
          {layer.up_weight.data, layer.up_weight.row_stride, layer.up_bias},
          layer.up_weight.data != nullptr,
          in,
          layer.out,
          layer.activation};
}

// Computes `layers`, which write the result for x to a given matrix, and the norms and sums around them.
template <typename Layers>
void compute(const PlainMlp& mlp, const Layers& layers, void* out) {
  const PointwiseShape in{mlp.dtype, mlp.rows, mlp.in};
  const PointwiseShape result{mlp.dtype, mlp.rows, mlp.layers[mlp.count - 1].out};
  Matrix x = mlp.x;
  std::unique_ptr<char[]> normed;
  if (mlp.first.kind != NormKind::kNone) {
    normed.reset(new char[mlp.rows * mlp.in * element_bytes(mlp.dtype)]);
    x = {normed.get(), mlp.in};
    norm_rows(in, mlp.first, mlp.x, kNoMatrix, x);
  }
  layers(x, out);
  const Matrix values{out, result.cols};
  if (mlp.residual.data != nullptr) norm_rows(result, mlp.last, values, mlp.residual, values);
}

std::function<void(void*)> steps_of(const PlainMlp& mlp, const few_rows::Layer& first,
                                    const std::optional<few_rows::Layer>& second) {
  return [=](void* out) {
    const auto run = [&](const Matrix& x, void* to) {
      few_rows::run(x, mlp.rows, first, second ? &*second : nullptr, to);
    };
    compute(mlp, run, out);
  };
}

}  // namespace

bool norm_directly(const PlainNorm& p, void* out) {
  norm_rows({p.dtype, p.rows, p.cols}, p.norm, p.x, kNoMatrix, {out, p.cols});
  return true;
}

bool may_be_direct(DType dtype, int64_t rows) { return few_rows::may_pay(dtype, rows); }

std::function<void(void*)> plan_direct(const PlainMlp& mlp) {
  if (mlp.layers[0].packed != nullptr) {
    return [=](void* out) { compute(mlp, [&](const Matrix& x, void* to) { run_packed(mlp, x, to); }, out); };
  }
  if (mlp.layers[0].transposed || mlp.layers[1].transposed) return {};
  const few_rows::Layer first = layer_of(mlp, 0);
  std::optional<few_rows::Layer> second;
  if (mlp.count == 2) second = layer_of(mlp, 1);
  return few_rows::take(mlp.rows, first, second ? &*second : nullptr, false) ? steps_of(mlp, first, second)
                                                                             : std::function<void(void*)>();
}

}  // namespace fused_mlp
