// The CUDA backend's ops for training: torch's GEMMs and pointwise kernels, or, if the GPU's architecture has them,
// GEMMs that do the pointwise work in their epilogues.

#include <vector>

#include "torch/torch_layer.h"
#include "training_gemms.h"

namespace fused_mlp {
namespace {

// Returns only the result. If the backward recomputes hidden values in blocks of rows, this function also computes no
// more of them at once.
Tensor forward(const Tensor& x, const FirstLayer& first, const OptionalTensor& second_weight,
               const OptionalTensor& second_bias, int64_t activation) {
  const Layer layer{first.weight, first.up_weight ? &*first.up_weight : nullptr, first.bias, first.up_bias, activation};
  if (!second_weight) return apply_layer(x, layer);
  const Tensor x_rows = Cuda::rows(x);
  const int64_t rows = x_rows.size(0), block = rows_of_a_block(rows, x_rows.size(1), first.weight.size(0));
  if (block == rows) {
    return apply_layers(x, layer, {*second_weight, nullptr, second_bias, kNoBias, kNoActivation});
  }
  const Tensor out = new_dense(x, with_last_size(x, second_weight->size(0)));
  const Tensor out_rows = matrix_view(out, {rows, out.size(-1)}, {out.size(-1), 1});
  for (int64_t start = 0; start < rows; start += block) {
    const int64_t count = std::min(block, rows - start);
    const Tensor hidden = apply_layer(rows_of(x_rows, start, count), layer);
    Cuda::linear_into(rows_of(out_rows, start, count), hidden, *second_weight, second_bias);
  }
  return out;
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> training_forward(const Tensor& x, const Tensor& weight,
                                                    const OptionalTensor& up_weight,
                                                    const OptionalTensor& second_weight, const OptionalTensor& bias,
                                                    const OptionalTensor& up_bias, const OptionalTensor& second_bias,
                                                    int64_t activation, bool keep, std::optional<bool> up_first) {
  const FirstLayer first(weight, up_weight, bias, up_bias, up_first);
  check_training(x, first, second_weight, second_bias, activation);
  const DeviceGuard device_guard(x.get_device_index());
  if (!keep) return {forward(x, first, second_weight, second_bias, activation), new_dense(x, {0}), new_dense(x, {0})};
  const TensorRows rows(x);
  const auto sizes = with_last_size(x, weight.size(0));
  KeptGemm fused(Cuda::rows(x), first, activation);
  const auto kept = [&](const Tensor& weight, const OptionalTensor& bias) {
    return fused ? new_dense(x, sizes) : torch_linear(rows, sizes, weight, bias);
  };
  const Tensor gate = kept(weight, bias), hidden = new_dense(x, with_last_size(x, first.weight.size(0)));
  const OptionalTensor up = up_weight ? OptionalTensor(kept(*up_weight, up_bias)) : std::nullopt;
  const auto run = [&](const Tensor& gate, const OptionalTensor& up) {
    fused ? fused.launch(gate, up, Cuda::rows(hidden)) : Cuda::apply(gate, up, Cuda::rows(hidden), activation);
  };
  if (up_first) {
    const auto [gate_rows, up_rows] = halves_of(gate, rows.rows, *up_first);
    run(gate_rows, up_rows);
  } else {
    run(Cuda::rows(gate), up ? OptionalTensor(Cuda::rows(*up)) : std::nullopt);
  }
  Tensor out = hidden;
  if (second_weight) {
    out = apply_layer(hidden, {*second_weight, nullptr, second_bias, kNoBias, kNoActivation}, {fused.ctas()});
  }
  return {out, gate, up ? *up : new_dense(x, {0})};
}

std::string plan_training(const Tensor& x, const Tensor& weight, const OptionalTensor& up_weight,
                          const OptionalTensor& second_weight, const OptionalTensor& bias,
                          const OptionalTensor& up_bias, int64_t activation, bool keep) {
  const FirstLayer first(weight, up_weight, bias, up_bias, std::nullopt);
  check_training(x, first, second_weight, std::nullopt, activation);
  const Left rows(Cuda::rows(x));
  const Matrix hidden{nullptr, weight.size(0)};
  PlanRecord plan;
  if (keep) KeptGemm(rows, first, activation).record(&plan);
  if (second_weight) {
    const Left grad(rows, second_weight->size(0));
    HiddenGradients(up_weight.has_value(), grad, *second_weight, hidden, up_weight ? hidden : kNoMatrix, activation)
        .record(&plan);
  }
  if (up_weight) {
    const Left grad(rows, weight.size(0));
    InputGradient({{grad, weight}, {grad, *up_weight}}).record(&plan);
  }
  return plan.text();
}

std::vector<Tensor> training_backward(const Tensor& grad, const OptionalTensor& x, const OptionalTensor& weight,
                                      const OptionalTensor& up_weight, const OptionalTensor& second_weight,
                                      const OptionalTensor& bias, const OptionalTensor& up_bias,
                                      const OptionalTensor& gate, const OptionalTensor& up, int64_t activation,
                                      int64_t needs, std::optional<bool> up_first) {
  const DeviceGuard device_guard(grad.get_device_index());
  return gradients<Cuda>(grad, x, weight, up_weight, second_weight, bias, up_bias, gate, up, activation, needs,
                         up_first, false);
}

std::vector<Tensor> training_backward_(const Tensor& grad, const OptionalTensor& x, const OptionalTensor& weight,
                                       const OptionalTensor& up_weight, const OptionalTensor& second_weight,
                                       const OptionalTensor& bias, const OptionalTensor& up_bias, const Tensor& gate,
                                       const OptionalTensor& up, int64_t activation, int64_t needs,
                                       std::optional<bool> up_first) {
  const DeviceGuard device_guard(grad.get_device_index());
  return gradients<Cuda>(grad, x, weight, up_weight, second_weight, bias, up_bias, gate, up, activation, needs,
                         up_first, true);
}

}  // namespace fused_mlp
