// The CUDA backend's ops of layers with 4-bit weights.
#include <torch/csrc/stable/accelerator.h>

#include <optional>

#include "../../torch-ext/plan.h"
#include "../../torch-ext/quantized.h"
#include "../../torch-ext/torch_gemm.h"
#include "../device.h"
#include "../fused_gemm.h"
#include "../layer.h"
#include "../pointwise.h"
#include "choice.h"
#include "decode.h"

namespace fused_mlp {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::accelerator::DeviceGuard;

CodedScales scales_of(const QuantizedWeight& weight) {
  if (!weight.nested()) return {weight.scales.const_data_ptr()};
  return {weight.scales.const_data_ptr(), static_cast<const float*>(weight.nested_scales->const_data_ptr()),
          static_cast<const float*>(weight.nested_code->const_data_ptr()), weight.nested_block,
          static_cast<float>(weight.offset)};
}

const float* code_of(const QuantizedWeight& weight) {
  return static_cast<const float*>(weight.code.const_data_ptr());
}

Tensor decoded(const QuantizedWeight& weight, ScalarType dtype) {
  const std::vector<int64_t> sizes{weight.n, weight.k};
  const Tensor out = new_dense(weight.data, sizes, dtype);
  const CodedElements elements{static_cast<const uint8_t*>(weight.data.const_data_ptr()), code_of(weight),
                               scales_of(weight), weight.elements(), weight.block};
  check(launch_decode(elements, out.mutable_data_ptr(), dtype_of(out, "dtype"), current_stream(out)));
  return out;
}

// One layer, or gate and up, of rows that a kernel reads or that are decoded before.
struct Part {
  const QuantizedLayer& first;
  const QuantizedLayer* up;
  int64_t activation;

  std::vector<const QuantizedLayer*> layers() const {
    return up == nullptr ? std::vector{&first} : std::vector{&first, up};
  }
};

// A layer by the streamed kernel, or the reason why that does not take it.
class CodedLayer {
 public:
  CodedLayer(const Part& part, const Matrix& a, int64_t rows, DType dtype, const Gpu& gpu)
      : part_(part), gpu_(gpu), refusal_(choose(part, a, rows, dtype)) {}

  Refusal refusal() const { return refusal_; }
  bool fused() const { return refusal_ == Refusal::kNone; }
  const CodedPlan& plan() const { return plan_; }

  void launch(const void* a, void* out, bool starts_early, cudaStream_t stream) {
    std::optional<Scratch> unnested[2];
    int i = 0;
    for (const QuantizedLayer* layer : part_.layers()) {
      if (layer->weight.nested()) {
        const int64_t count = layer->weight.blocks();
        auto* const scales = static_cast<float*>(unnested[i].emplace(count * sizeof(float)).data());
        check(launch_unnest(scales_of(layer->weight), count, scales, stream));
        (i == 0 ? problem_.weight : problem_.up_weight).scales = scales;
        starts_early = false;
      }
      ++i;
    }
    problem_.a.data = const_cast<void*>(a);
    problem_.out.data = out;
    problem_.starts_early = starts_early;
    check(launch_coded(problem_, plan_, gpu_, stream));
  }

 private:
  static CodedWeight weight_of(const QuantizedWeight& weight) {
    // Nested scales are replaced at the launch.
    const void* const scales = weight.nested() ? nullptr : weight.scales.const_data_ptr();
    return {static_cast<const uint8_t*>(weight.data.const_data_ptr()), static_cast<const float*>(scales),
            code_of(weight)};
  }

  Refusal choose(const Part& part, const Matrix& a, int64_t rows, DType dtype) {
    const QuantizedWeight& weight = part.first.weight;
    for (const QuantizedLayer* layer : part.layers()) {
      if (layer->weight.block != kCodedBlock) return Refusal::kOddFeatures;
    }
    problem_ = {a, weight_of(weight), {}, {nullptr, weight.n}, rows, weight.n, weight.k, dtype, {}, false};
    problem_.epilogue.activation = part.activation;
    if (part.up != nullptr) problem_.up_weight = weight_of(part.up->weight);
    const bool dense = describe_bias(part.first.bias, &problem_.epilogue.bias) &&
                       (part.up == nullptr || describe_bias(part.up->bias, &problem_.epilogue.up_bias));
    if (!dense) return Refusal::kStridedBias;
    return choose_coded(problem_, gpu_, &plan_);
  }

  const Part part_;
  const Gpu& gpu_;
  CodedProblem problem_{};
  CodedPlan plan_{};
  const Refusal refusal_;
};

// Gate and up whose codes are not the same tensor are two products.
bool shares_code(const Part& part) { return part.up == nullptr || code_of(part.first.weight) == code_of(part.up->weight); }

Tensor run(const Tensor& x, const Part& part, bool behind_ours, bool* ours);

Tensor run_decoded(const Tensor& x, const Part& part) {
  const Tensor weight = decoded(part.first.weight, x.scalar_type());
  const OptionalTensor up =
      part.up != nullptr ? OptionalTensor(decoded(part.up->weight, x.scalar_type())) : std::nullopt;
  return apply_layer(x, {weight, up ? &*up : nullptr, part.first.bias, up ? part.up->bias : kNoBias, part.activation});
}

// Gate and up one after the other, by the kernel that each of them takes.
Tensor run_apart(const Tensor& x, const Part& part) {
  bool ours = false;
  const Tensor gate = run(x, {part.first, nullptr, kNoActivation}, false, &ours);
  const Tensor up = run(x, {*part.up, nullptr, kNoActivation}, false, &ours);
  const TensorRows of_gate(gate), of_up(up);
  check(launch_act_and_mul(matrix(of_gate), matrix(of_up), matrix(of_gate), of_gate.rows, of_gate.cols,
                           dtype_of(gate, "x"), part.activation, current_stream(gate)));
  return gate;
}

// `behind_ours`: the kernel before is a streamed one of ours. Says of this layer's kernel whether it is one.
Tensor run(const Tensor& x, const Part& part, bool behind_ours, bool* ours) {
  const TensorRows rows(x);
  CodedLayer layer(part, matrix(rows), rows.rows, dtype_of(x, "x"), gpu(x.get_device_index()));
  *ours = false;
  if (!layer.fused()) return run_decoded(x, part);
  if (!shares_code(part)) return run_apart(x, part);
  const Tensor out = new_dense(x, with_last_size(x, part.first.weight.n));
  layer.launch(rows.tensor.const_data_ptr(), out.mutable_data_ptr(), behind_ours, current_stream(x));
  *ours = true;
  return out;
}

Part first_of(const QuantizedLayers& layers, int64_t activation) { return {layers.first(), layers.up(), activation}; }
Part second_of(const QuantizedLayers& layers) { return {*layers.second(), nullptr, kNoActivation}; }

Tensor run(const Tensor& x, const QuantizedLayers& layers, int64_t activation) {
  const DeviceGuard device_guard(x.get_device_index());
  bool ours = false;
  const Tensor hidden = run(x, first_of(layers, activation), false, &ours);
  return layers.second() == nullptr ? hidden : run(hidden, second_of(layers), ours, &ours);
}

void record(const Part& part, const Matrix& a, int64_t rows, DType dtype, const Gpu& gpu, PlanRecord* plan) {
  const CodedLayer layer(part, a, rows, dtype, gpu);
  plan->layer();
  if (!layer.fused()) {
    plan->set("implementation", "decoded").set("refusal", code(layer.refusal()));
    return;
  }
  const CodedPlan& chosen = layer.plan();
  plan->set("implementation", "quantized").set("kernel", name(chosen.loop));
  plan->set("block_m", chosen.tokens).set("split_k", chosen.split);
}

}  // namespace

Tensor quantized_decode(const std::vector<OptionalTensor>& weight, const std::vector<int64_t>& layout, double offset,
                        ScalarType dtype) {
  STD_TORCH_CHECK(weight.size() == QuantizedWeight::kOperands && layout.size() == QuantizedWeight::kSizes,
                  "weight must have 5 elements, and layout 4");
  const QuantizedWeight given(weight, layout, offset, 0);
  const DeviceGuard device_guard(given.data.get_device_index());
  return decoded(given, dtype);
}

Tensor quantized_linear(const Tensor& x, const std::vector<OptionalTensor>& weight, const std::vector<int64_t>& layout,
                        double offset, const OptionalTensor& bias, int64_t activation) {
  return run(x, QuantizedLayers(x, weight, layout, {offset}, {bias}, activation, false), activation);
}

Tensor quantized_mlp(const Tensor& x, const std::vector<OptionalTensor>& weights, const std::vector<int64_t>& layouts,
                     const std::vector<double>& offsets, const std::vector<OptionalTensor>& biases, int64_t activation,
                     bool gated) {
  return run(x, QuantizedLayers(x, weights, layouts, offsets, biases, activation, gated), activation);
}

std::string plan_quantized(const Tensor& x, const std::vector<OptionalTensor>& weights,
                           const std::vector<int64_t>& layouts, const std::vector<OptionalTensor>& biases,
                           int64_t activation, bool gated) {
  const std::vector<double> offsets(biases.size());
  const QuantizedLayers layers(x, weights, layouts, offsets, biases, activation, gated);
  const TensorRows rows(x);
  const Gpu& of_x = gpu(x.get_device_index());
  PlanRecord plan;
  record(first_of(layers, activation), matrix(rows), rows.rows, dtype_of(x, "x"), of_x, &plan);
  if (layers.second() != nullptr) {
    record(second_of(layers), {nullptr, layers.first().weight.n}, rows.rows, dtype_of(x, "x"), of_x, &plan);
  }
  return plan.text();
}

}  // namespace fused_mlp
