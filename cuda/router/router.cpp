// The router of a mixture on a GPU: torch's GEMM, whose logits equal those of an unfused model bit for bit, and a
// kernel.
#include "router.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>
#include <torch/csrc/stable/ops.h>

#include "../../torch-ext/operands/operands.h"
#include "../../torch-ext/ops/torch_gemm.h"
#include "../../torch-ext/torch_binding.h"
#include "../device.h"

namespace fused_mlp {

using torch::headeronly::ScalarType;

std::tuple<Tensor, Tensor, Tensor> top_k_router(const Tensor& x, const Tensor& weight, int64_t top_k, bool normalized,
                                                bool narrow) {
  check_router(x, weight, top_k);
  const int64_t tokens = x.size(0), experts = weight.size(0);
  STD_TORCH_CHECK(experts <= kMaxRoutedExperts && top_k <= kMaxChosen, "no kernel supports this many experts");
  const DeviceGuard device_guard(x.get_device_index());
  const Tensor logits = new_dense(x, {tokens, experts});
  linear_into<aoti_torch_cuda_mm_out, aoti_torch_cuda_addmm_out>(logits, x, weight, std::nullopt);
  const Tensor weights = narrow ? new_dense(x, {tokens, top_k}) : new_dense(x, {tokens, top_k}, ScalarType::Float);
  const Tensor index = new_dense(x, {tokens, top_k}, ScalarType::Long);
  if (tokens > 0) {
    check(launch_choice(
        {logits.const_data_ptr(), tokens, static_cast<int>(experts), static_cast<int>(top_k), normalized,
         dtype_of(x, "x"), narrow, weights.mutable_data_ptr(), static_cast<int64_t*>(index.mutable_data_ptr())},
        current_stream(x)));
  }
  return {logits, weights, index};
}

namespace {

Tensor wide(const Tensor& tensor) {
  return tensor.scalar_type() == ScalarType::Float ? tensor : torch::stable::to(tensor, ScalarType::Float);
}

// x weight^T in float32.
Tensor wide_logits(const Tensor& x, const Tensor& weight) {
  const int64_t tokens = x.size(0), experts = weight.size(0), k = x.size(1);
  const Tensor logits = new_dense(x, {tokens, experts}, ScalarType::Float);
  const auto streams = [](const Tensor& matrix) {
    return matrix.stride(1) == 1 && matrix.stride(0) % 8 == 0 &&
           reinterpret_cast<uintptr_t>(matrix.const_data_ptr()) % 16 == 0;
  };
  const DType dtype = dtype_of(x, "x");
  if (dtype == DType::kFloat32 || tokens > kMostStreamedTokens || k % 8 != 0 || !streams(x) || !streams(weight)) {
    linear_into<aoti_torch_cuda_mm_out, aoti_torch_cuda_addmm_out>(logits, wide(x), wide(weight), std::nullopt);
  } else if (tokens > 0) {
    const auto matrix = [](const Tensor& tensor) { return Matrix{tensor.mutable_data_ptr(), tensor.stride(0)}; };
    check(launch_logits({matrix(x), matrix(weight), tokens, k, static_cast<int>(experts), dtype,
                         static_cast<float*>(logits.mutable_data_ptr())},
                        current_stream(x)));
  }
  return logits;
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> sigmoid_router(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                                  int64_t top_k, int64_t groups, int64_t top_groups, bool normalized,
                                                  double scaling) {
  check_router(x, weight, top_k);
  const int64_t tokens = x.size(0), experts = weight.size(0);
  STD_TORCH_CHECK(experts <= kMaxRoutedExperts && top_k <= kMaxChosen, "no kernel supports this many experts");
  STD_TORCH_CHECK(bias.dim() == 1 && bias.size(0) == experts && bias.get_device_index() == x.get_device_index(),
                  "bias must be [experts], on the device of x");
  STD_TORCH_CHECK(0 < groups && groups <= kMaxGroups && experts % groups == 0 && experts / groups >= 2,
                  "groups must be between 1 and ", kMaxGroups, ", all of the same size, at least two experts each");
  STD_TORCH_CHECK(0 < top_groups && top_groups <= groups, "top_groups must be between 1 and the number of groups");
  const DeviceGuard device_guard(x.get_device_index());
  const Tensor logits = wide_logits(x, weight), biases = torch::stable::contiguous(wide(bias));
  const Tensor weights = new_dense(x, {tokens, top_k}, ScalarType::Float);
  const Tensor index = new_dense(x, {tokens, top_k}, ScalarType::Long);
  if (tokens > 0) {
    check(launch_sigmoid_choice(
        {static_cast<const float*>(logits.const_data_ptr()), static_cast<const float*>(biases.const_data_ptr()), tokens,
         static_cast<int>(experts), static_cast<int>(top_k), static_cast<int>(groups), static_cast<int>(top_groups),
         normalized, static_cast<float>(scaling), static_cast<float*>(weights.mutable_data_ptr()),
         static_cast<int64_t*>(index.mutable_data_ptr())},
        current_stream(x)));
  }
  return {logits, weights, index};
}

}  // namespace fused_mlp
