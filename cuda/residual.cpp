// MLPs with the residual and the norm of their block.
#include "../torch-ext/residual.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include "../torch-ext/torch_binding.h"
#include "device.h"
#include "layer.h"
#include "norm.h"

namespace fused_mlp {
namespace {

// What residual.h asks of a backend.
struct Cuda {
  static void norm(const Tensor& x, const Tensor* residual, const Around& around, const Tensor& out) {
    const TensorRows rows(x), other(residual == nullptr ? x : *residual);
    const DenseVector scale(around.weight), shift(around.bias);
    check(launch_norm({matrix(rows),
                       residual == nullptr ? kNoMatrix : matrix(other),
                       {out.mutable_data_ptr(), rows.cols},
                       rows.rows,
                       rows.cols,
                       dtype_of(x, "x"),
                       scale.data(),
                       shift.data(),
                       static_cast<float>(*around.eps),
                       around.weight_offset(),
                       around.centred()},
                      current_stream(x)));
  }

  static Tensor sum(const Tensor& a, const Tensor& b) {
    AtenTensorHandle sum = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_add_Tensor(a.get(), b.get(), 1.0, &sum));
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
  const torch::stable::accelerator::DeviceGuard device_guard(x.get_device_index());
  return block<Cuda>(x, {residual, norm_weight, norm_bias, eps, norm}, [&](const Tensor& values) {
    const Layer last{fc2_weight, nullptr, fc2_bias, kNoBias, kNoActivation};
    if (!fc1_weight) return apply_layer(values, last);
    return apply_layers(values, {*fc1_weight, nullptr, fc1_bias, kNoBias, activation}, last);
  });
}

Tensor residual_gated_mlp(const Tensor& x, const Tensor& gate_weight, const Tensor& up_weight,
                          const Tensor& down_weight, const OptionalTensor& gate_bias, const OptionalTensor& up_bias,
                          const OptionalTensor& down_bias, int64_t activation, const Tensor& residual,
                          const OptionalTensor& norm_weight, const OptionalTensor& norm_bias, std::optional<double> eps,
                          int64_t norm) {
  check_residual_gated_mlp(x, gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias, activation, residual,
                           norm_weight, norm_bias, eps, norm);
  const torch::stable::accelerator::DeviceGuard device_guard(x.get_device_index());
  return block<Cuda>(x, {residual, norm_weight, norm_bias, eps, norm}, [&](const Tensor& values) {
    return apply_layers(values, {gate_weight, &up_weight, gate_bias, up_bias, activation},
                        {down_weight, nullptr, down_bias, kNoBias, kNoActivation});
  });
}

}  // namespace fused_mlp
