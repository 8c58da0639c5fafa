// The ops for layers with quantised weights; their operands are checked here for all backends.
#include "quantized.h"

namespace fused_mlp {

Tensor quantized_decode(const std::vector<OptionalTensor>& weight, const std::vector<int64_t>& layout, double offset,
                        torch::headeronly::ScalarType dtype) {
  STD_TORCH_CHECK(weight.size() == QuantizedWeight::kOperands && layout.size() == QuantizedWeight::kSizes,
                  "weight must have 5 elements, and layout 5");
  const QuantizedWeight given(weight, layout, offset, 0);
  return decoded(given.packed, given.data, dtype);
}

Tensor quantized_linear(const Tensor& x, const std::vector<OptionalTensor>& weight, const std::vector<int64_t>& layout,
                        double offset, const OptionalTensor& bias, int64_t activation) {
  return run_quantized(x, {x, weight, layout, {offset}, {bias}, activation, false}, activation);
}

Tensor quantized_mlp(const Tensor& x, const std::vector<OptionalTensor>& weights, const std::vector<int64_t>& layouts,
                     const std::vector<double>& offsets, const std::vector<OptionalTensor>& biases, int64_t activation,
                     bool gated) {
  return run_quantized(x, {x, weights, layouts, offsets, biases, activation, gated}, activation);
}

}  // namespace fused_mlp
