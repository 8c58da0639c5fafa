// MLPs with the residual and the norm of their block.
#include "../../torch-ext/ops/norms/residual.h"

#include <torch/csrc/stable/ops.h>

#include "../../torch-ext/operands/tensor_rows.h"
#include "../../torch-ext/torch_binding.h"
#include "norms.h"

namespace fused_mlp {
namespace {

// The functions that residual.h requires of a backend.
struct Cpu {
  static void norm(const TensorRows& x, const Matrix& residual, const Norm& norm, const Tensor& out) {
    norm_rows({dtype_of(x.tensor, "x"), x.rows, x.cols}, norm, matrix(x), residual, {out.mutable_data_ptr(), x.cols});
  }
};

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
  return block<Cpu>(x, around, [&](const Tensor& values) {
    return fc1_weight ? mlp(values, *fc1_weight, fc2_weight, fc1_bias, fc2_bias, activation)
                      : linear(values, fc2_weight, fc2_bias, static_cast<int64_t>(Activation::kLinear));
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
  return block<Cpu>(x, around, [&](const Tensor& values) {
    return gated_mlp(values, gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias, activation);
  });
}

}  // namespace fused_mlp
