#include "direct_mixture.h"

#include <torch/csrc/stable/ops.h>

#include <tuple>

#include "../../operands/operands.h"
#include "../../torch_binding.h"

namespace fused_mlp {
namespace {

using torch::headeronly::ScalarType;

ScalarType scalar_type(const dlpack::DataType& type) {
  if (type == dlpack::kFloat32) return ScalarType::Float;
  return type == dlpack::kFloat16 ? ScalarType::Half : ScalarType::BFloat16;
}

ScalarType scalar_type(DType dtype) {
  if (dtype == DType::kFloat32) return ScalarType::Float;
  return dtype == DType::kFloat16 ? ScalarType::Half : ScalarType::BFloat16;
}

// Tensors that do not own their memory.
class Views {
 public:
  explicit Views(const PlainMixture& mixture) : mixture_(mixture), device_(device_of(mixture)) {}

  Tensor rows(const Matrix& matrix) const {
    return torch::stable::from_blob(matrix.data, {mixture_.rows, mixture_.width}, {matrix.row_stride, 1}, device_,
                                    scalar_type(mixture_.dtype));
  }
  Tensor of(const dlpack::Tensor& tensor) const {
    using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;
    const size_t dims = tensor.dims;
    return torch::stable::from_blob(tensor.data, Sizes(tensor.sizes, dims), Sizes(tensor.strides, dims), device_,
                                    scalar_type(tensor.dtype));
  }
  OptionalTensor of(const std::optional<dlpack::Tensor>& tensor) const {
    return tensor ? OptionalTensor(of(*tensor)) : std::nullopt;
  }

 private:
  static torch::stable::Device device_of(const PlainMixture& mixture) {
#if defined(CUDA_KERNEL)
    return {torch::headeronly::DeviceType::CUDA, static_cast<int8_t>(mixture.device)};
#else
    (void)mixture;
    return {torch::headeronly::DeviceType::CPU, -1};
#endif
  }

  const PlainMixture& mixture_;
  torch::stable::Device device_;
};

std::tuple<Tensor, Tensor, Tensor> routed(const PlainMixture& m, const Views& views, const Tensor& x) {
#if defined(CUDA_KERNEL)
  if (m.router_bias) {
    return sigmoid_router(x, views.of(m.router), views.of(*m.router_bias), m.top_k, m.groups, m.top_groups,
                          m.normalized, m.scaling);
  }
#endif
  return top_k_router(x, views.of(m.router), m.top_k, m.normalized, m.narrow);
}

}  // namespace

bool mixture_directly(const PlainMixture& m, void* out) {
  const Views views(m);
  Tensor x = views.rows(m.x);
  if (m.first.kind != NormKind::kNone) {
    const Tensor normed = new_dense(x, {m.rows, m.width});
    if (!norm_directly({m.dtype, m.device, m.x, m.rows, m.width, m.first}, normed.mutable_data_ptr())) return false;
    x = normed;
  }
  const auto [logits, weights, index] = routed(m, views, x);
  const OptionalTensor residual = m.residual.data == nullptr ? std::nullopt : OptionalTensor(views.rows(m.residual));
  experts_into(views.rows({out, m.width}), residual, x, index, weights, views.of(m.gate_up), views.of(m.down),
               views.of(m.gate_up_bias), views.of(m.down_bias), m.activation, m.gated, m.interleaved, m.transposed,
               m.limit, m.up_offset);
  return true;
}

}  // namespace fused_mlp
