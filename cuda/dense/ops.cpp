// The CUDA backend's ops for inference, and the pointwise ones.
#include <torch/csrc/stable/ops.h>

#include "../../torch-ext/operands/operands.h"
#include "../../torch-ext/ops/elementwise.h"
#include "../../torch-ext/torch_binding.h"
#include "../device.h"
#include "../pointwise/pointwise.h"
#include "layer.h"
#include "torch/products.h"

namespace fused_mlp {

Tensor act_and_mul(const Tensor& gate, const Tensor& up, int64_t activation) {
  check_activation(activation);
  check_same_shape(up, "up", gate);
  const DeviceGuard device_guard(gate.get_device_index());
  const Tensor out = new_dense(gate, gate.sizes());
  const Walk walk({&gate, &up});
  check(launch_act_and_mul(walk.input(0), walk.input(1), walk.output(out), walk.rows, walk.cols, dtype_of(gate, "gate"),
                           activation, current_stream(gate)));
  return out;
}

std::tuple<Tensor, Tensor> act_and_mul_backward(const Tensor& grad, const Tensor& gate, const Tensor& up,
                                                int64_t activation) {
  check_activation(activation);
  check_same_shape(gate, "gate", grad);
  check_same_shape(up, "up", grad);
  const DeviceGuard device_guard(gate.get_device_index());
  const Tensor gate_grad = new_dense(gate, gate.sizes()), up_grad = new_dense(up, up.sizes());
  const Walk walk({&grad, &gate, &up});
  check(launch_act_and_mul_backward(walk.input(0), walk.input(1), walk.input(2), walk.output(gate_grad),
                                    walk.output(up_grad), kNoMatrix, walk.rows, walk.cols, dtype_of(gate, "gate"),
                                    activation, current_stream(gate)));
  return {gate_grad, up_grad};
}

Tensor mm(const Tensor& a, const Tensor& b) {
  check_product(a, b);
  const DeviceGuard device_guard(a.get_device_index());
  const Tensor out = new_dense(a, {a.size(0), b.size(1)});
  multiply(out, a, b);
  return out;
}

Tensor linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, int64_t activation) {
  check_activation(activation);
  check_linear(x, weight, bias);
  const DeviceGuard device_guard(x.get_device_index());
  return apply_layer(x, {weight, nullptr, bias, kNoBias, activation});
}

Tensor gated_linear(const Tensor& x, const Tensor& gate_weight, const Tensor& up_weight,
                    const OptionalTensor& gate_bias, const OptionalTensor& up_bias, int64_t activation) {
  check_activation(activation);
  check_gated_linear(x, gate_weight, up_weight, gate_bias, up_bias);
  const DeviceGuard device_guard(x.get_device_index());
  return apply_layer(x, {gate_weight, &up_weight, gate_bias, up_bias, activation});
}

Tensor gated_mlp(const Tensor& x, const Tensor& gate_weight, const Tensor& up_weight, const Tensor& down_weight,
                 const OptionalTensor& gate_bias, const OptionalTensor& up_bias, const OptionalTensor& down_bias,
                 int64_t activation) {
  check_activation(activation);
  check_gated_linear(x, gate_weight, up_weight, gate_bias, up_bias);
  check_second(x, gate_weight, down_weight, down_bias);
  const DeviceGuard device_guard(x.get_device_index());
  return apply_layers(x, {gate_weight, &up_weight, gate_bias, up_bias, activation},
                      {down_weight, nullptr, down_bias, kNoBias, kNoActivation});
}

Tensor mlp(const Tensor& x, const Tensor& fc1_weight, const Tensor& fc2_weight, const OptionalTensor& fc1_bias,
           const OptionalTensor& fc2_bias, int64_t activation) {
  check_activation(activation);
  check_linear(x, fc1_weight, fc1_bias);
  check_second(x, fc1_weight, fc2_weight, fc2_bias);
  const DeviceGuard device_guard(x.get_device_index());
  return apply_layers(x, {fc1_weight, nullptr, fc1_bias, kNoBias, activation},
                      {fc2_weight, nullptr, fc2_bias, kNoBias, kNoActivation});
}

}  // namespace fused_mlp
