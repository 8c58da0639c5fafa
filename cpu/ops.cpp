// The CPU backend's ops: GEMMs on blocks of rows small enough to stay in cache, the pointwise kernels between them.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <vector>

#include "../torch-ext/activation.h"
#include "../torch-ext/tensor_rows.h"
#include "../torch-ext/torch_binding.h"
#include "isa.h"
#include "pointwise.h"

namespace fused_mlp {
namespace {

using torch::headeronly::IntHeaderOnlyArrayRef;
using torch::headeronly::ScalarType;

const PointwiseKernels& pointwise() {
#if defined(__x86_64__)
  switch (isa()) {
    case Isa::kAmx:
    case Isa::kAvx512:
      return avx512::kPointwise;
    case Isa::kAvx2:
      return avx2::kPointwise;
    case Isa::kScalar:
      break;
  }
#endif
  return scalar::kPointwise;
}

Dtype checked_dtype(const char* name, const Tensor& tensor) {
  const ScalarType dtype = tensor.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::BFloat16, name, " is ",
                  torch::headeronly::toString(dtype), "; the CPU kernels take float32 and bfloat16");
  return dtype == ScalarType::Float ? Dtype::kFloat32 : Dtype::kBFloat16;
}

void check_activation(int64_t activation) {
  STD_TORCH_CHECK(visit_activation(activation, []<Activation>() {}), "activation must be a code of activation.h, not ",
                  activation);
}

// torch's operators, called from within ours, must not record gradients: `out=` variants refuse to.
class NoGrad {
 public:
  NoGrad() : enabled_(aoti_torch_grad_mode_is_enabled()) { aoti_torch_grad_mode_set_enabled(false); }
  ~NoGrad() { aoti_torch_grad_mode_set_enabled(enabled_); }
  NoGrad(const NoGrad&) = delete;
  NoGrad& operator=(const NoGrad&) = delete;

 private:
  bool enabled_;
};

// out = x weight^T + bias
void linear_out(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const Tensor& out) {
  using torch::stable::detail::from;
  std::array<StableIValue, 4> stack{from(x), from(weight), from(bias), from(out)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::linear", "out", stack.data(), TORCH_ABI_VERSION));
  torch::stable::detail::to<Tensor>(stack[0]);
}

Tensor new_matrix(const Tensor& like, int64_t rows, int64_t cols) {
  return torch::stable::new_empty(like, std::array<int64_t, 2>{rows, cols});
}

// x.shape[:-1] + (features,)
std::vector<int64_t> output_sizes(const Tensor& x, int64_t features) {
  const auto sizes = x.sizes();
  std::vector<int64_t> result(sizes.begin(), sizes.end());
  result.back() = features;
  return result;
}

// Applies kernel(shape, rows of each operand...) to all rows, in parallel. The operands have equal sizes.
template <typename Kernel, typename... Operands>
void for_each_row(const Kernel& kernel, Dtype dtype, const Operands&... operands) {
  ...
}

}  // namespace
}  // namespace fused_mlp
