#include "torch_layer.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>

#include <algorithm>

#include "../../../torch-ext/operands/operands.h"
#include "../../../torch-ext/ops/torch_gemm.h"
#include "../../device.h"
#include "../../pointwise/pointwise.h"
#include "products.h"

namespace fused_mlp {
namespace {

using torch::headeronly::ScalarType;

bool in_vectors(const void* data, int64_t row_stride) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && row_stride % kVectorOfHalves == 0;
}

Matrix dense_matrix(const Tensor& rows) { return {rows.mutable_data_ptr(), rows.size(1)}; }

}  // namespace

bool torch_has_epilogue(const Matrix& x, const Layer& layer) {
  const Tensor& weight = layer.weight;
  return static_cast<Activation>(layer.activation) == Activation::kGeluTanh && layer.up_weight == nullptr &&
         layer.bias.has_value() && weight.scalar_type() != ScalarType::Float && weight.size(1) > 0 &&
         weight.size(0) % kVectorOfHalves == 0 && weight.size(1) % kVectorOfHalves == 0 &&
         in_vectors(x.data, x.row_stride) &&
         in_vectors(weight.const_data_ptr(), std::max(weight.stride(0), weight.stride(1))) &&
         in_vectors(layer.bias->const_data_ptr(), 0);
}

Tensor torch_layer(const Tensor& x, const Layer& layer) {
  if (!torch_has_epilogue({x.mutable_data_ptr(), x.stride(0)}, layer)) {
    const std::vector<int64_t> sizes{x.size(0), layer.weight.size(0)};
    const Tensor out = new_dense(x, sizes);
    torch_layer_into(out, x, layer);
    return out;
  }
  constexpr int32_t kUseGelu = 1;
  AtenTensorHandle out = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_cuda__addmm_activation(layer.bias->get(), x.get(), transposed(layer.weight).get(),
                                                           1.0, 1.0, kUseGelu, &out));
  return Tensor(out);
}

void torch_layer_into(const Tensor& out, const Tensor& x, const Layer& layer) {
  multiply(out, x, transposed(layer.weight), layer.bias);
  const bool gated = layer.up_weight != nullptr;
  if (!gated && layer.activation == kNoActivation) return;
  const Tensor up = gated ? new_dense(out, out.sizes()) : out;
  if (gated) multiply(up, x, transposed(*layer.up_weight), layer.up_bias);
  check(launch_act_and_mul(dense_matrix(out), gated ? dense_matrix(up) : kNoMatrix, dense_matrix(out), out.size(0),
                           out.size(1), dtype_of(out, "x"), layer.activation, current_stream(out)));
}

Tensor torch_linear(const TensorRows& x, const std::vector<int64_t>& out_sizes, const Tensor& weight,
                    const OptionalTensor& bias) {
  const int64_t n = weight.size(0);
  const Tensor out = new_dense(x.tensor, out_sizes);
  multiply(matrix_view(out, {x.rows, n}, {n, 1}), matrix_view(x), transposed(weight), bias);
  return out;
}

}  // namespace fused_mlp
