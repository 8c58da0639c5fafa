// The CPU backend's ops for inference.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <string>

#include "../../torch-ext/operands/operands.h"
#include "../../torch-ext/ops/elementwise.h"
#include "../few_rows/few_rows_mlp.h"
#include "../few_rows/matmul.h"
#include "../isa/isa.h"
#include "../layers.h"
#include "../training_gemms.h"

namespace fused_mlp {

const PointwiseKernels& pointwise() {
#if defined(__x86_64__)
  if (const PointwiseKernels* vectors = widest(avx512::kPointwise, avx2::kPointwise)) return *vectors;
#endif
  return scalar::kPointwise;
}

Tensor act_and_mul(const Tensor& gate, const Tensor& up, int64_t activation) {
  check_activation(activation);
  check_same_shape(up, "up", gate);
  const DType dtype = dtype_of(gate, "gate");
  const Tensor out = new_dense(gate, gate.sizes());
  const Walk walk({&gate, &up});
  run_pointwise(pointwise().act_and_mul, {dtype, walk.rows, walk.cols}, activation, walk.input(0), walk.input(1),
                walk.output(out));
  return out;
}

std::tuple<Tensor, Tensor> act_and_mul_backward(const Tensor& grad, const Tensor& gate, const Tensor& up,
                                                int64_t activation) {
  check_activation(activation);
  check_same_shape(gate, "gate", grad);
  check_same_shape(up, "up", grad);
  const DType dtype = dtype_of(gate, "gate");
  const Tensor gate_grad = new_dense(gate, gate.sizes()), up_grad = new_dense(up, up.sizes());
  const Walk walk({&grad, &gate, &up});
  run_pointwise(pointwise().act_and_mul_backward, {dtype, walk.rows, walk.cols}, activation, walk.input(0),
                walk.input(1), walk.input(2), walk.output(gate_grad), walk.output(up_grad), kNoMatrix);
  return {gate_grad, up_grad};
}

Tensor mm(const Tensor& a, const Tensor& b) {
  check_product(a, b);
  const Tensor out = new_dense(a, {a.size(0), b.size(1)});
  Cpu::mm(out, a, b);
  return out;
}

Tensor linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, int64_t activation) {
  check_activation(activation);
  check_linear(x, weight, bias);
  return run_layers(x, {weight, bias, nullptr, nullptr, activation}, nullptr);
}

Tensor gated_linear(const Tensor& x, const Tensor& gate_weight, const Tensor& up_weight,
                    const OptionalTensor& gate_bias, const OptionalTensor& up_bias, int64_t activation) {
  check_activation(activation);
  check_gated_linear(x, gate_weight, up_weight, gate_bias, up_bias);
  return run_layers(x, {gate_weight, gate_bias, &up_weight, &up_bias, activation}, nullptr);
}

Tensor gated_mlp(const Tensor& x, const Tensor& gate_weight, const Tensor& up_weight, const Tensor& down_weight,
                 const OptionalTensor& gate_bias, const OptionalTensor& up_bias, const OptionalTensor& down_bias,
                 int64_t activation) {
  check_activation(activation);
  check_gated_linear(x, gate_weight, up_weight, gate_bias, up_bias);
  check_second(x, gate_weight, down_weight, down_bias);
  const OutputLayer down{down_weight, down_bias};
  return run_layers(x, {gate_weight, gate_bias, &up_weight, &up_bias, activation}, &down);
}

Tensor mlp(const Tensor& x, const Tensor& fc1_weight, const Tensor& fc2_weight, const OptionalTensor& fc1_bias,
           const OptionalTensor& fc2_bias, int64_t activation) {
  check_activation(activation);
  check_linear(x, fc1_weight, fc1_bias);
  check_second(x, fc1_weight, fc2_weight, fc2_bias);
  const OutputLayer fc2{fc2_weight, fc2_bias};
  return run_layers(x, {fc1_weight, fc1_bias, nullptr, nullptr, activation}, &fc2);
}

std::string plan(const Tensor& x, const Tensor& weight, const OptionalTensor& up_weight,
                 const OptionalTensor& second_weight, const OptionalTensor& bias, const OptionalTensor& up_bias,
                 const OptionalTensor& second_bias, int64_t activation) {
  const HiddenLayer hidden{weight, bias, up_weight ? &*up_weight : nullptr, &up_bias, activation};
  const std::optional<OutputLayer> output =
      second_weight ? std::optional<OutputLayer>({*second_weight, second_bias}) : std::nullopt;
  const Refusal refusal = tiles_refusal(x, hidden, output ? &*output : nullptr);
  const bool few_rows = takes_few_rows(x, count_rows(x), hidden, output ? &*output : nullptr, false);
  PlanRecord plan;
  const char* const vector = name(std::min(isa(), Isa::kAvx512));
  const auto record = [&](const Tensor& weight, bool pointwise) {
    const bool tiles = refusal == Refusal::kNone;
    const bool vectors = !tiles && vectors::takes_layer(dtype_of(x, "x"), count_rows(x), weight);
    const char* const streamed = few_rows::instruction_set(dtype_of(x, "x"));
    plan.layer().set("implementation", few_rows ? streamed : vectors ? vector : tiles ? "amx" : "torch");
    if (few_rows || tiles) return;
    vectors ? plan.set("kernel", "matmul") : plan.set("refusal", code(refusal));
    if (pointwise) plan.set("pointwise", vector);
  };
  record(weight, hidden.gated() || static_cast<Activation>(activation) != Activation::kLinear);
  if (output) record(output->weight, false);
  return plan.text();
}

}  // namespace fused_mlp
