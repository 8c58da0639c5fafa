// Single norms, forward and backward.
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>

#include "../../torch-ext/ops/norms/norm_training.h"
#include "../device.h"
#include "../pointwise/column_sums.h"
#include "run_norm.h"

namespace fused_mlp {
namespace {

// The functions that norm_training.h requires of a backend.
struct Cuda {
  static void norm(const TensorRows& x, const Norm& norm, const Tensor& y, const Tensor& statistics) {
    run_norm(x, kNoMatrix, norm, y, static_cast<float*>(statistics.mutable_data_ptr()));
  }

  static constexpr bool kSums = true;

  static std::pair<Tensor, Tensor> drop(const Tensor& x, double p) {
    int32_t train = 1;
    AtenTensorHandle values = nullptr, kept = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_native_dropout(x.get(), p, &train, &values, &kept));
    return {Tensor(values), Tensor(kept)};
  }

  static void sum_norm(const TensorRows& x, const TensorRows& residual, const Norm& norm, const Tensor& sum,
                       const Tensor& y, const Tensor& statistics) {
    run_norm(x, matrix(residual), norm, y, static_cast<float*>(statistics.mutable_data_ptr()), sum.mutable_data_ptr());
  }

  static void gradients(const TensorRows& x, const TensorRows& grad, const TensorRows* residual_grad, const Norm& norm,
                        const Tensor& statistics, const OptionalTensor& kept, double dropout,
                        const NormGradientsOf& wanted) {
    const cudaStream_t stream = current_stream(x.tensor);
    const auto to = [&](const OptionalTensor& out) {
      return out ? Matrix{out->mutable_data_ptr(), x.cols} : kNoMatrix;
    };
    NormGradients rows{matrix(x),
                       matrix(grad),
                       residual_grad == nullptr ? kNoMatrix : matrix(*residual_grad),
                       to(wanted.x),
                       to(wanted.dropped),
                       x.rows,
                       x.cols,
                       dtype_of(x.tensor, "x"),
                       norm,
                       static_cast<const float*>(statistics.const_data_ptr()),
                       kept ? static_cast<const uint8_t*>(kept->const_data_ptr()) : nullptr,
                       static_cast<float>(1.0 / (1.0 - dropout)),
                       wanted.dropped || wanted.dropped_bias,
                       nullptr};
    const int64_t parts = parts_of_norm_gradients(rows, gpu(x.tensor.get_device_index()).multiprocessors);
    const int64_t stride = x.cols * rows.kinds_of_sums();
    std::optional<Scratch> sums;
    if (wanted.weight || wanted.bias || wanted.dropped_bias) {
      sums.emplace(parts * stride * static_cast<int64_t>(sizeof(float)));
      rows.sums = static_cast<float*>(sums->data());
    }
    check(launch_norm_gradients(rows, parts, stream));
    if (!sums) return;
    const int groups = static_cast<int>(rows.kinds_of_sums());
    SumTargets targets{};
    const auto add = [&](const OptionalTensor& out, int group) {
      if (!out) return;
      targets.of[group] = out->mutable_data_ptr();
      targets.dtypes[group] = dtype_of(*out, "weight");
    };
    add(wanted.weight, 0);
    add(wanted.bias, 1);
    add(wanted.dropped_bias, groups - 1);
    const int64_t summed = x.rows == 0 ? 0 : parts;
    check(launch_grouped_sums(rows.sums, summed, x.cols, groups, targets, stream));
  }
};

}  // namespace

std::tuple<Tensor, Tensor> norm_forward(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                                        double eps, int64_t norm, bool rounded) {
  const BlockNorm given{weight, bias, eps, norm};
  check_norm_alone(given, x);
  const DeviceGuard device_guard(x.get_device_index());
  return normed<Cuda>(x, given, rounded);
}

std::vector<Tensor> sum_norm_forward(const Tensor& x, const Tensor& residual, const OptionalTensor& weight,
                                     const OptionalTensor& bias, double eps, int64_t norm, double dropout) {
  const DeviceGuard device_guard(x.get_device_index());
  return sum_normed<Cuda>(x, residual, {weight, bias, eps, norm}, dropout);
}

std::vector<Tensor> norm_backward(const Tensor& grad, const Tensor& x, const OptionalTensor& weight,
                                  const Tensor& statistics, const OptionalTensor& residual_grad,
                                  const OptionalTensor& kept, double dropout, int64_t norm, int64_t needs) {
  const DeviceGuard device_guard(x.get_device_index());
  return norm_gradients<Cuda>(grad, x, weight, statistics, residual_grad, kept, dropout, norm, needs);
}

}  // namespace fused_mlp
