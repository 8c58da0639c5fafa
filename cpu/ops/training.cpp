// Training of MLPs on a CPU.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <string>
#include <vector>

#include "../../torch-ext/operands/operands.h"
#include "../../torch-ext/operands/tensor_rows.h"
#include "../../torch-ext/ops/backward.h"
#include "../amx/amx_matmul.h"
#include "../few_rows/few_rows_mlp.h"
#include "../few_rows/matmul.h"
#include "../isa/isa.h"
#include "../layers.h"
#include "../training_gemms.h"

namespace fused_mlp {

std::tuple<Tensor, Tensor, Tensor> training_forward(const Tensor& x, const Tensor& weight,
                                                    const OptionalTensor& up_weight,
                                                    const OptionalTensor& second_weight, const OptionalTensor& bias,
                                                    const OptionalTensor& up_bias, const OptionalTensor& second_bias,
                                                    int64_t activation, bool keep, std::optional<bool> up_first) {
  const FirstLayer first(weight, up_weight, bias, up_bias, up_first);
  check_training(x, first, second_weight, second_bias, activation);
  const HiddenLayer hidden{first.weight, first.bias, first.up_weight ? &*first.up_weight : nullptr, &first.up_bias,
                           activation};
  const std::optional<OutputLayer> second =
      second_weight ? std::optional<OutputLayer>({*second_weight, second_bias}) : std::nullopt;
  const OutputLayer* const output = second ? &*second : nullptr;
  if (!keep) return {run_layers(x, hidden, output), new_dense(x, {0}), new_dense(x, {0})};
  const Tensor flat = flatten_rows(x), out = new_result(x, output ? output->features() : hidden.features());
  const Tensor gate = new_result(x, weight.size(0)), up = up_weight ? new_result(x, weight.size(0)) : new_dense(x, {0});
  const int64_t rows = flat.size(0);
  const Kept kept{matrix_of(gate, rows), up_weight ? matrix_of(up, rows) : up, up_first};
  run_rows(flat, hidden, output, matrix_of(out, rows), &kept);
  return {out, gate, up};
}

std::string plan_training(const Tensor& x, const Tensor& weight, const OptionalTensor& up_weight,
                          const OptionalTensor& second_weight, const OptionalTensor& bias,
                          const OptionalTensor& up_bias, int64_t activation, bool keep) {
  const FirstLayer first(weight, up_weight, bias, up_bias, std::nullopt);
  check_training(x, first, second_weight, std::nullopt, activation);
  const HiddenLayer hidden{first.weight, first.bias, first.up_weight ? &*first.up_weight : nullptr, &first.up_bias,
                           activation};
  const OptionalTensor no_bias;
  const std::optional<OutputLayer> second =
      second_weight ? std::optional<OutputLayer>({*second_weight, no_bias}) : std::nullopt;
  PlanRecord plan;
  const DType dtype = dtype_of(x, "x");
  const int64_t rows = count_rows(x);
  const char* const vector = name(std::min(isa(), Isa::kAvx512));
  const auto record = [&](Refusal refusal, bool vectors) -> PlanRecord& {
    const bool tiles = refusal == Refusal::kNone;
    plan.layer().set("implementation", tiles ? "amx" : vectors ? vector : "torch");
    return tiles || vectors ? plan : plan.set("refusal", code(refusal));
  };
  const OutputLayer* const output = second ? &*second : nullptr;
  if (keep && takes_few_rows(x, rows, hidden, output, true)) {
    plan.layer().set("implementation", few_rows::instruction_set(dtype));
  } else if (keep) {
    const Refusal refusal = tiles_refusal(x, hidden, output);
    const bool vectors = refusal != Refusal::kNone && vectors::takes_layer(dtype, rows, first.weight);
    record(refusal, vectors);
    if (vectors) plan.set("kernel", "matmul");
  }
  Refusal products = Refusal::kNone;
  const int64_t out_features = second ? second->features() : weight.size(0);
  if (std::min({rows, x.size(-1), weight.size(0), out_features}) < amx::kLeastOfMatmul) {
    products = Refusal::kTorchIsFaster;
  }
  if (isa() != Isa::kAmx) products = Refusal::kInstructionSet;
  if (dtype != DType::kBFloat16) products = Refusal::kFloat32;
  record(products, vectors::takes_backward(dtype, rows, x.size(-1))).set("kernel", "matmul");
  return plan.text();
}

// Measured in training steps of whole models, except those of the scalar code. If bfloat16 has our own products, on
// tiles or because torch has no instructions for them, an op pays at any size.
int64_t least_recorded(const Tensor& x) {
  if (isa() == Isa::kScalar) return 1 << 17;
  if (dtype_of(x, "x") == DType::kFloat32) return has_wide_vectors() ? 1 << 12 : 1 << 13;
  return isa() == Isa::kAvx512 || isa() == Isa::kAvx512Bf16 ? 1 << 20 : 0;
}

std::vector<Tensor> training_backward(const Tensor& grad, const OptionalTensor& x, const OptionalTensor& weight,
                                      const OptionalTensor& up_weight, const OptionalTensor& second_weight,
                                      const OptionalTensor& bias, const OptionalTensor& up_bias,
                                      const OptionalTensor& gate, const OptionalTensor& up, int64_t activation,
                                      int64_t needs, std::optional<bool> up_first) {
  return gradients<Cpu>(grad, x, weight, up_weight, second_weight, bias, up_bias, gate, up, activation, needs, up_first,
                        false);
}

std::vector<Tensor> training_backward_(const Tensor& grad, const OptionalTensor& x, const OptionalTensor& weight,
                                       const OptionalTensor& up_weight, const OptionalTensor& second_weight,
                                       const OptionalTensor& bias, const OptionalTensor& up_bias, const Tensor& gate,
                                       const OptionalTensor& up, int64_t activation, int64_t needs,
                                       std::optional<bool> up_first) {
  return gradients<Cpu>(grad, x, weight, up_weight, second_weight, bias, up_bias, gate, up, activation, needs, up_first,
                        true);
}

}  // namespace fused_mlp
