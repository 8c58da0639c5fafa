// MLPs with the residual and the norm of their block.
#include "../torch-ext/residual.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/stable/ops.h>

#include "../torch-ext/tensor_rows.h"
#include "../torch-ext/torch_binding.h"
#include "parallel.h"
#include "pointwise.h"

namespace fused_mlp {
namespace {

// What residual.h asks of a backend.
struct Cpu {
  static void norm(const Tensor& x, const Tensor* residual, const Around& around, const Tensor& out) {
    const auto matrix = [](const TensorRows& rows) {
      return Matrix{const_cast<void*>(rows.tensor.const_data_ptr()), rows.row_stride};
    };
    const TensorRows rows(x), other(residual == nullptr ? x : *residual);
    const DenseVector scale(around.weight), shift(around.bias);
    const DType dtype = dtype_of(x, "x");
    const Norm norm{scale.data(), shift.data(), static_cast<float>(*around.eps), around.weight_offset(),
                    around.centred()};
    const Matrix from = matrix(rows), with = residual == nullptr ? Matrix{nullptr, 0} : matrix(other);
    const Matrix to{out.mutable_data_ptr(), rows.cols};
    if (rows.rows == 0 || rows.cols == 0) return;
    torch::stable::parallel_for(0, rows.rows, ceil_div(kGrain, rows.cols), [&](int64_t begin, int64_t end) {
      pointwise().norm({dtype, end - begin, rows.cols}, norm, from_row(from, begin, dtype),
                       with.data == nullptr ? with : from_row(with, begin, dtype), from_row(to, begin, dtype));
    });
  }

  static Tensor sum(const Tensor& a, const Tensor& b) {
    AtenTensorHandle sum = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_add_Tensor(a.get(), b.get(), 1.0, &sum));
    return Tensor(sum);
  }
};

}  // namespace

Tensor residual_mlp(const Tensor& x, const OptionalTensor& fc1_weight, const Tensor& fc2_weight,
                    const OptionalTensor& fc1_bias, const OptionalTensor& fc2_bias, int64_t activation,
                    const Tensor& residual, const OptionalTensor& norm_weight, const OptionalTensor& norm_bias,
                    std::optional<double> eps, int64_t norm) {
  check_residual_mlp(x, fc1_weight, fc2_weight, fc1_bias, fc2_bias, activation, residual, norm_weight, norm_bias, eps,
                     norm);
  return block<Cpu>(x, {residual, norm_weight, norm_bias, eps, norm}, [&](const Tensor& values) {
    return fc1_weight ? mlp(values, *fc1_weight, fc2_weight, fc1_bias, fc2_bias, activation)
                      : linear(values, fc2_weight, fc2_bias, static_cast<int64_t>(Activation::kLinear));
  });
}

Tensor residual_gated_mlp(const Tensor& x, const Tensor& gate_weight, const Tensor& up_weight,
                          const Tensor& down_weight, const OptionalTensor& gate_bias, const OptionalTensor& up_bias,
                          const OptionalTensor& down_bias, int64_t activation, const Tensor& residual,
                          const OptionalTensor& norm_weight, const OptionalTensor& norm_bias, std::optional<double> eps,
                          int64_t norm) {
  check_residual_gated_mlp(x, gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias, activation, residual,
                           norm_weight, norm_bias, eps, norm);
  return block<Cpu>(x, {residual, norm_weight, norm_bias, eps, norm}, [&](const Tensor& values) {
    return gated_mlp(values, gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias, activation);
  });
}

}  // namespace fused_mlp
