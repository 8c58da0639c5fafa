// An MLP with the residual and the norm of its block.
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/stable/ops.h>

#include "../torch-ext/operands.h"
#include "../torch-ext/tensor_rows.h"
#include "../torch-ext/torch_binding.h"
#include "parallel.h"
#include "pointwise.h"

namespace fused_mlp {
namespace {

// LayerNorm of x, or of its sum with a residual that has its shape.
void apply_norm(const Tensor& x, const Tensor* residual, const OptionalTensor& weight, const OptionalTensor& bias,
                double eps, const Tensor& out) {
  const auto matrix = [](const TensorRows& rows) {
    return Matrix{const_cast<void*>(rows.tensor.const_data_ptr()), rows.row_stride};
  };
  const TensorRows rows(x), other(residual == nullptr ? x : *residual);
  const DenseVector scale(weight), shift(bias);
  const DType dtype = dtype_of(x, "x");
  const Norm norm{scale.data(), shift.data(), static_cast<float>(eps)};
  const Matrix from = matrix(rows), with = residual == nullptr ? Matrix{nullptr, 0} : matrix(other);
  const Matrix to{out.mutable_data_ptr(), rows.cols};
  if (rows.rows == 0 || rows.cols == 0) return;
  torch::stable::parallel_for(0, rows.rows, ceil_div(kGrain, rows.cols), [&](int64_t begin, int64_t end) {
    pointwise().layer_norm({dtype, end - begin, rows.cols}, norm, from_row(from, begin, dtype),
                           with.data == nullptr ? with : from_row(with, begin, dtype), from_row(to, begin, dtype));
  });
}

}  // namespace

Tensor residual_mlp(const Tensor& x, const OptionalTensor& fc1_weight, const Tensor& fc2_weight,
                    const OptionalTensor& fc1_bias, const OptionalTensor& fc2_bias, int64_t activation,
                    const Tensor& residual, bool residual_first, const OptionalTensor& norm_weight,
                    const OptionalTensor& norm_bias, std::optional<double> eps, bool norm_first) {
  check_residual_mlp(x, fc1_weight, fc2_weight, fc1_bias, fc2_bias, activation, residual, norm_weight, norm_bias, eps,
                     norm_first);
  Tensor values = x;
  if (norm_first) {
    values = new_dense(x, x.sizes());
    const bool copied = !x.is_contiguous();
    if (copied) TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(values.get(), x.get(), 0));
    apply_norm(copied ? values : x, nullptr, norm_weight, norm_bias, *eps, values);
  }
  values = fc1_weight ? mlp(values, *fc1_weight, fc2_weight, fc1_bias, fc2_bias, activation)
                      : linear(values, fc2_weight, fc2_bias, static_cast<int64_t>(Activation::kLinear));
  if (eps && !norm_first) {
    apply_norm(values, &residual, norm_weight, norm_bias, *eps, values);
    return values;
  }
  const Tensor &first = residual_first ? residual : values, &second = residual_first ? values : residual;
  AtenTensorHandle sum = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_add_Tensor(first.get(), second.get(), 1.0, &sum));
  return Tensor(sum);
}

}  // namespace fused_mlp
