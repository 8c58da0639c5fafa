// Training of MLPs on a CPU.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <string>
#include <vector>

#include "../torch-ext/backward.h"
#include "../torch-ext/operands.h"
#include "../torch-ext/tensor_rows.h"
#include "amx_matmul.h"
#include "few_rows_mlp.h"
#include "isa.h"
#include "layers.h"
#include "matmul.h"

namespace fused_mlp {
namespace {

// The functions that backward.h asks of a backend.
struct Cpu {
  static constexpr bool kHasSums = false;

  static void linear_into(const Tensor& out, const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
    run_products(x, {weight, bias, nullptr, nullptr, static_cast<int64_t>(Activation::kLinear)}, nullptr, out);
  }

  static void mm(const Tensor& out, const Tensor& a, const Tensor& b) { multiply(out, a, b, false); }
  static void add_mm(const Tensor& out, const Tensor& a, const Tensor& b) { multiply(out, a, b, true); }

  static bool batches(const Tensor&, int64_t) { return false; }
  static void mm_both(Tensor&, Tensor&, const Tensor&, const Tensor&, const Tensor&) {}

  static Tensor column_sums(const Tensor& x, std::optional<torch::headeronly::ScalarType> dtype) {
    constexpr int64_t kColumns = 32;  // a line of memory
    const PointwiseShape all = shape(x);
    if (dtype || all.dtype != DType::kBFloat16) {
      const int64_t rows = 0;
      return torch::stable::sum(x, torch::headeronly::IntHeaderOnlyArrayRef(&rows, 1), false, dtype);
    }
    const Tensor out = new_dense(x, {all.cols});
    const Matrix in = matrix(x), sums{out.mutable_data_ptr(), all.cols};
    const int64_t grain = ceil_div(kGrain, std::max<int64_t>(all.rows * kColumns, 1));
    torch::stable::parallel_for(0, ceil_div(all.cols, kColumns), grain, [&](int64_t begin, int64_t end) {
      const int64_t first = begin * kColumns, cols = std::min(end * kColumns, all.cols) - first;
      pointwise().column_sums({all.dtype, all.rows, cols}, from_column(in, first, all.dtype),
                              from_column(sums, first, all.dtype));
    });
    return out;
  }

  static Tensor rows(const Tensor& x) {
    const TensorRows found(x);
    return gemm_rows(matrix_view(found.tensor, {found.rows, found.cols}, {found.row_stride, 1}));
  }

  static void apply(const Tensor& gate, const OptionalTensor& up, const Tensor& out, int64_t activation) {
    if (up) {
      run_pointwise(pointwise().act_and_mul, shape(gate), activation, matrix(gate), matrix(*up), matrix(out));
    } else {
      run_pointwise(pointwise().act, shape(gate), activation, matrix(gate), matrix(out));
    }
  }

  static void differentiate(const Tensor& grad, const Tensor& gate, const OptionalTensor& up, const Tensor& dgate,
                            const OptionalTensor& dup, const OptionalTensor& values, int64_t activation) {
    const Matrix of_values = values ? matrix(*values) : kNoMatrix;
    if (up) {
      run_pointwise(pointwise().act_and_mul_backward, shape(gate), activation, matrix(grad), matrix(gate), matrix(*up),
                    matrix(dgate), matrix(*dup), of_values);
    } else {
      run_pointwise(pointwise().act_backward, shape(gate), activation, matrix(grad), matrix(gate), matrix(dgate),
                    of_values);
    }
  }

  template <typename... Operands>
  static NoKernel kept_values(const Operands&...) {
    return {};
  }
  template <typename... Operands>
  static NoKernel hidden_gradients(const Operands&...) {
    return {};
  }
  template <typename... Operands>
  static NoKernel input_gradient(const Operands&...) {
    return {};
  }

 private:
  static PointwiseShape shape(const Tensor& rows) { return {dtype_of(rows, "x"), rows.size(0), rows.size(1)}; }
  static Matrix matrix(const Tensor& rows) { return {const_cast<void*>(rows.const_data_ptr()), rows.stride(0)}; }
};

}  // namespace

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

// Measured in training steps of whole models, except those of the scalar code. With products of its own for bfloat16,
// on tiles or where torch's have no instructions for them, an op pays at any size.
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
