// The ops of attentions: their projections of one input, and rotary embeddings.
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>
#include <torch/csrc/stable/accelerator.h>

#include "../../torch-ext/ops/attention/projections.h"
#include "../../torch-ext/ops/attention/rotated.h"
#include "../dense/training_gemms.h"
#include "rotary.h"

namespace fused_mlp {
namespace {

using torch::stable::accelerator::DeviceGuard;

// The functions that projections.h and rotated.h ask of a backend.
struct Attention : Cuda {
  static void torch_linear(const Tensor& out, const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
    linear_into(out, x, weight, bias);
  }

  static std::vector<Tensor> all_column_sums(const std::vector<Tensor>& given) {
    if (given.size() == 1) return {column_sums(given[0], std::nullopt)};
    std::vector<Tensor> found;
    SumSources sources{};
    for (const Tensor& each : given) {
      found.push_back(new_dense(each, std::vector<int64_t>{each.size(1)}));
      sources.of[found.size() - 1] = {matrix(each), each.size(1), found.back().mutable_data_ptr()};
    }
    check(launch_joint_sums(sources, given[0].size(0), dtype_of(given[0], "grad"), current_stream(given[0])));
    return found;
  }

  static DType dtype(const Tensor& q) { return dtype_of(q, "q"); }
  static void rotary(const Rotary& rotary, const Tensor& q) { check(launch_rotary(rotary, current_stream(q))); }
};

}  // namespace

std::vector<Tensor> projections_forward(const Tensor& x, const Tensor& first_weight,
                                        const OptionalTensor& second_weight, const OptionalTensor& third_weight,
                                        const OptionalTensor& first_bias, const OptionalTensor& second_bias,
                                        const OptionalTensor& third_bias) {
  const DeviceGuard device_guard(x.get_device_index());
  const OptionalTensor first(first_weight);
  return projections<Attention>(x, {&first, &second_weight, &third_weight}, {&first_bias, &second_bias, &third_bias});
}

std::vector<Tensor> projections_backward(const OptionalTensor& first_grad, const OptionalTensor& second_grad,
                                         const OptionalTensor& third_grad, const OptionalTensor& x,
                                         const OptionalTensor& first_weight, const OptionalTensor& second_weight,
                                         const OptionalTensor& third_weight, int64_t needs) {
  const Tensor& like = first_grad ? *first_grad : second_grad ? *second_grad : third_grad.value();
  const DeviceGuard device_guard(like.get_device_index());
  return projection_gradients<Attention>({&first_grad, &second_grad, &third_grad}, x,
                                         {&first_weight, &second_weight, &third_weight}, needs);
}

std::tuple<Tensor, Tensor> rotary(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin,
                                  bool inverse) {
  const DeviceGuard device_guard(q.get_device_index());
  return rotated<Attention>(q, k, cos, sin, inverse);
}

}  // namespace fused_mlp
