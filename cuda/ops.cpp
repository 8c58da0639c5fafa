// The CUDA backend's ops: torch's GEMMs with the pointwise kernels between them, one op per public function.
#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include <array>
#include <vector>

#include "../torch-ext/activation.h"
#include "../torch-ext/tensor_rows.h"
#include "../torch-ext/torch_binding.h"
#include "pointwise.h"

// torch's header declares it only under USE_CUDA.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

namespace fused_mlp {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::accelerator::DeviceGuard;

void check(cudaError_t error) {
  STD_TORCH_CHECK(error == cudaSuccess, "fused_mlp: CUDA error: ", cudaGetErrorString(error));
}

cudaStream_t current_stream(const Tensor& tensor) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

DType dtype_of(const Tensor& tensor, const char* name) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    default:
      STD_TORCH_CHECK(false, name, " must be float32, float16 or bfloat16");
  }
}

// An operand that is only read: asking for a mutable pointer would make torch copy a copy-on-write tensor.
Matrix matrix(const TensorRows& rows) { return {const_cast<void*>(rows.tensor.const_data_ptr()), rows.row_stride}; }

Matrix dense_matrix(const Tensor& tensor, int64_t cols) { return {tensor.mutable_data_ptr(), cols}; }

constexpr Matrix kNoMatrix{nullptr, 0};

// [..., cols] as [rows, cols], a view wherever the strides admit one.
Tensor flatten_rows(const Tensor& x) {
  if (x.dim() == 2) return x;
  const auto sizes = x.sizes();
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) rows *= sizes[d];
  return torch::stable::reshape(x, {rows, sizes[x.dim() - 1]});
}

// [rows, cols] back to the leading dimensions of x.
Tensor restore_leading_dims(const Tensor& flat, const Tensor& x) {
  if (x.dim() == 2) return flat;
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = flat.size(1);
  return torch::stable::view(flat, sizes);
}

Tensor torch_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  std::array<StableIValue, 3> stack{torch::stable::detail::from(x), torch::stable::detail::from(weight),
                                    torch::stable::detail::from(bias)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::linear", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// act(x weight^T + bias) for x [rows, in]; the activation overwrites the GEMM's result.
Tensor flat_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, int64_t activation) {
  const Tensor out = torch_linear(x, weight, bias);
  if (static_cast<Activation>(activation) != Activation::kLinear) {
    const Matrix rows = dense_matrix(out, out.size(1));
    check(launch_act_and_mul(rows, kNoMatrix, rows, out.size(0), out.size(1), dtype_of(out, "x"), activation,
                             current_stream(out)));
  }
  return out;
}

// act(x gate_weight^T + gate_bias) * (x up_weight^T + up_bias) for x [rows, in]; the product overwrites the gate.
Tensor flat_gated_linear(const Tensor& x, const Tensor& gate_weight, const Tensor& up_weight,
                         const OptionalTensor& gate_bias, const OptionalTensor& up_bias, int64_t activation) {
  const Tensor gate = torch_linear(x, gate_weight, gate_bias);
  const Tensor up = torch_linear(x, up_weight, up_bias);
  const Matrix gate_rows = dense_matrix(gate, gate.size(1));
  check(launch_act_and_mul(gate_rows, dense_matrix(up, up.size(1)), gate_rows, gate.size(0), gate.size(1),
                           dtype_of(gate, "x"), activation, current_stream(gate)));
  return gate;
}

}  // namespace

Tensor act_and_mul(const Tensor& gate, const Tensor& up, int64_t activation) {
  const DeviceGuard device_guard(gate.get_device_index());
  const TensorRows gate_rows(gate), up_rows(up);
  const Tensor out = torch::stable::new_empty(gate, gate.sizes());
  check(launch_act_and_mul(matrix(gate_rows), matrix(up_rows), dense_matrix(out, gate_rows.cols), gate_rows.rows,
                           gate_rows.cols, dtype_of(gate, "gate"), activation, current_stream(gate)));
  return out;
}

std::tuple<Tensor, Tensor> act_and_mul_backward(const Tensor& grad, const Tensor& gate, const Tensor& up,
                                                int64_t activation) {
  const DeviceGuard device_guard(gate.get_device_index());
  const TensorRows grad_rows(grad), gate_rows(gate), up_rows(up);
  const Tensor gate_grad = torch::stable::new_empty(gate, gate.sizes());
  const Tensor up_grad = torch::stable::new_empty(up, up.sizes());
  check(launch_act_and_mul_backward(matrix(grad_rows), matrix(gate_rows), matrix(up_rows),
                                    dense_matrix(gate_grad, gate_rows.cols), dense_matrix(up_grad, gate_rows.cols),
                                    gate_rows.rows, gate_rows.cols, dtype_of(gate, "gate"), activation,
                                    current_stream(gate)));
  return {gate_grad, up_grad};
}

Tensor linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, int64_t activation) {
  const DeviceGuard device_guard(x.get_device_index());
  return restore_leading_dims(flat_linear(flatten_rows(x), weight, bias, activation), x);
}

Tensor gated_linear(const Tensor& x, const Tensor& gate_weight, const Tensor& up_weight,
                    const OptionalTensor& gate_bias, const OptionalTensor& up_bias, int64_t activation) {
  const DeviceGuard device_guard(x.get_device_index());
  return restore_leading_dims(
      flat_gated_linear(flatten_rows(x), gate_weight, up_weight, gate_bias, up_bias, activation), x);
}

Tensor gated_mlp(const Tensor& x, const Tensor& gate_weight, const Tensor& up_weight, const Tensor& down_weight,
                 const OptionalTensor& gate_bias, const OptionalTensor& up_bias, const OptionalTensor& down_bias,
                 int64_t activation) {
  const DeviceGuard device_guard(x.get_device_index());
  const Tensor hidden = flat_gated_linear(flatten_rows(x), gate_weight, up_weight, gate_bias, up_bias, activation);
  return restore_leading_dims(torch_linear(hidden, down_weight, down_bias), x);
}

Tensor mlp(const Tensor& x, const Tensor& fc1_weight, const Tensor& fc2_weight, const OptionalTensor& fc1_bias,
           const OptionalTensor& fc2_bias, int64_t activation) {
  const DeviceGuard device_guard(x.get_device_index());
  const Tensor hidden = flat_linear(flatten_rows(x), fc1_weight, fc1_bias, activation);
  return restore_leading_dims(torch_linear(hidden, fc2_weight, fc2_bias), x);
}

}  // namespace fused_mlp
