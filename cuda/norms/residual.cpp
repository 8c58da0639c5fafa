// MLPs with the residual and the norm of their block.
#include "../../torch-ext/ops/norms/residual.h"

#include <torch/csrc/stable/ops.h>

#include "../../torch-ext/torch_binding.h"
#include "../dense/layer.h"
#include "../device.h"
#include "run_norm.h"

namespace fused_mlp {
namespace {

// The functions that residual.h requires of a backend.
struct Cuda {
  static void norm(const TensorRows& x, const Matrix& residual, const Norm& norm, const Tensor& out) {
    run_norm(x, residual, norm, out);
  }
};

Place place_of(const Around& around, const Tensor& x) {
  return {around.first.kind != 0 ? most_norm_ctas(TensorRows(x).rows) : 0, true};
}

}  // namespace

Tensor residual_mlp(const Tensor& x, const OptionalTensor& fc1_weight, const Tensor& fc2_weight,
                    const OptionalTensor& fc1_bias, const OptionalTensor& fc2_bias, int64_t activation,
                    const Tensor& residual, double factor, const OptionalTensor& first_weight,
                    const OptionalTensor& first_bias, double first_eps, int64_t first_norm,
                    const OptionalTensor& last_weight, const OptionalTensor& last_bias, double last_eps,
                    int64_t last_norm, bool norms_sum) {
  const Around around{residual,
                      factor,
                      {first_weight, first_bias, first_eps, first_norm},
                      {last_weight, last_bias, last_eps, last_norm},
                      norms_sum};
  check_residual_mlp(x, fc1_weight, fc2_weight, fc1_bias, fc2_bias, activation, around);
  const DeviceGuard device_guard(x.get_device_index());
  return block<Cuda>(x, around, [&](const Tensor& values) {
    const Layer last{fc2_weight, nullptr, fc2_bias, kNoBias, kNoActivation};
    if (!fc1_weight) return apply_layer(values, last, place_of(around, values));
    return apply_layers(values, {*fc1_weight, nullptr, fc1_bias, kNoBias, activation}, last, place_of(around, values));
  });
}

Tensor residual_gated_mlp(const Tensor& x, const Tensor& gate_weight, const Tensor& up_weight,
                          const Tensor& down_weight, const OptionalTensor& gate_bias, const OptionalTensor& up_bias,
                          const OptionalTensor& down_bias, int64_t activation, const Tensor& residual, double factor,
                          const OptionalTensor& first_weight, const OptionalTensor& first_bias, double first_eps,
                          int64_t first_norm, const OptionalTensor& last_weight, const OptionalTensor& last_bias,
                          double last_eps, int64_t last_norm, bool norms_sum) {
  const Around around{residual,
                      factor,
                      {first_weight, first_bias, first_eps, first_norm},
                      {last_weight, last_bias, last_eps, last_norm},
                      norms_sum};
  check_residual_gated_mlp(x, gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias, activation, around);
  const DeviceGuard device_guard(x.get_device_index());
  return block<Cuda>(x, around, [&](const Tensor& values) {
    return apply_layers(values, {gate_weight, &up_weight, gate_bias, up_bias, activation},
                        {down_weight, nullptr, down_bias, kNoBias, kNoActivation}, place_of(around, values));
  });
}

}  // namespace fused_mlp
