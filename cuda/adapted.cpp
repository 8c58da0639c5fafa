// The CUDA backend's ops of layers with adapters.
#include "../torch-ext/adapted.h"

#include <torch/csrc/stable/accelerator.h>

#include "training_gemms.h"

namespace fused_mlp {

using torch::stable::accelerator::DeviceGuard;

std::vector<Tensor> adapted_forward(const Tensor& x, const std::vector<Tensor>& weights,
                                    const std::vector<OptionalTensor>& biases, const std::vector<OptionalTensor>& a,
                                    const std::vector<OptionalTensor>& b, const std::vector<double>& scalings,
                                    bool gated, int64_t activation, int64_t keep) {
  const AdaptedLayers layers(weights, biases, a, b, scalings, gated);
  layers.check(x, activation);
  const DeviceGuard device_guard(x.get_device_index());
  return Adapted<Cuda>(x, x, layers, activation).forward(static_cast<Keep>(keep));
}

std::vector<Tensor> adapted_backward(const Tensor& grad, const OptionalTensor& x, const std::vector<Tensor>& weights,
                                     const std::vector<OptionalTensor>& biases, const std::vector<OptionalTensor>& a,
                                     const std::vector<OptionalTensor>& b, const std::vector<double>& scalings,
                                     const OptionalTensor& gate, const OptionalTensor& up,
                                     const OptionalTensor& first_rows, const OptionalTensor& second_rows, bool gated,
                                     int64_t activation, int64_t needs) {
  const AdaptedLayers layers(weights, biases, a, b, scalings, gated);
  layers.check_backward(grad, x, gate, needs, activation);
  layers.check_kept(gate, up, first_rows, second_rows, needs, activation);
  const DeviceGuard device_guard(grad.get_device_index());
  return Adapted<Cuda>(grad, x, layers, activation).backward(grad, gate, up, first_rows, second_rows, needs);
}

}  // namespace fused_mlp
