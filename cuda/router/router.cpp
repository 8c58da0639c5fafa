// The router of a mixture on a GPU: torch's GEMM, whose logits are those of an unfused model to the bit, and a kernel.
#include "router.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>
#include <torch/csrc/stable/accelerator.h>

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
  STD_TORCH_CHECK(experts <= kMaxRoutedExperts && top_k <= kMaxChosen, "there is no kernel for so many experts");
  const torch::stable::accelerator::DeviceGuard device_guard(x.get_device_index());
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

}  // namespace fused_mlp
