// Norms by themselves, forward and backward.
#include <torch/csrc/stable/accelerator.h>

#include "../torch-ext/norm_training.h"
#include "column_sums.h"
#include "device.h"
#include "run_norm.h"

namespace fused_mlp {
namespace {

// The functions that norm_training.h asks of a backend.
struct Cuda {
  static void norm(const TensorRows& x, const Norm& norm, const Tensor& y, const Tensor& statistics) {
    run_norm(x, kNoMatrix, norm, y, static_cast<float*>(statistics.mutable_data_ptr()));
  }

  static void gradients(const TensorRows& x, const TensorRows& grad, const TensorRows* residual_grad, const Norm& norm,
                        const Tensor& statistics, const OptionalTensor& dx, const OptionalTensor& dweight,
                        const OptionalTensor& dbias) {
    const cudaStream_t stream = current_stream(x.tensor);
    NormGradients rows{matrix(x),
                       matrix(grad),
                       residual_grad == nullptr ? kNoMatrix : matrix(*residual_grad),
                       dx ? Matrix{dx->mutable_data_ptr(), x.cols} : kNoMatrix,
                       x.rows,
                       x.cols,
                       dtype_of(x.tensor, "x"),
                       norm,
                       static_cast<const float*>(statistics.const_data_ptr()),
                       nullptr};
    const int64_t parts = parts_of_norm_gradients(rows, gpu(x.tensor.get_device_index()).multiprocessors);
    const int64_t stride = x.cols * (norm.centred() ? 2 : 1);
    OptionalTensor sums;
    if (dweight || dbias) {
      const std::vector<int64_t> sizes{parts, stride};
      sums = new_dense(x.tensor, sizes, torch::headeronly::ScalarType::Float);
      rows.sums = static_cast<float*>(sums->mutable_data_ptr());
    }
    check(launch_norm_gradients(rows, parts, stream));
    const auto add_up = [&](const OptionalTensor& out, int64_t first) {
      if (!out) return;
      const int64_t summed = x.rows == 0 ? 0 : parts;
      check(launch_column_sums({rows.sums + first, stride}, summed, x.cols, DType::kFloat32, out->mutable_data_ptr(),
                               dtype_of(*out, "weight"), nullptr, 1, stream));
    };
    add_up(dweight, 0);
    add_up(dbias, x.cols);
  }
};

}  // namespace

std::tuple<Tensor, Tensor> norm_forward(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                                        double eps, int64_t norm, bool rounded) {
  const BlockNorm given{weight, bias, eps, norm};
  check_norm_alone(given, x);
  const torch::stable::accelerator::DeviceGuard device_guard(x.get_device_index());
  return normed<Cuda>(x, given, rounded);
}

std::vector<Tensor> norm_backward(const Tensor& grad, const Tensor& x, const OptionalTensor& weight,
                                  const Tensor& statistics, const OptionalTensor& residual_grad, int64_t norm,
                                  int64_t needs) {
  const torch::stable::accelerator::DeviceGuard device_guard(x.get_device_index());
  return norm_gradients<Cuda>(grad, x, weight, statistics, residual_grad, norm, needs);
}

}  // namespace fused_mlp
