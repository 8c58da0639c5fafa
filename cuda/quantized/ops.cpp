// The CUDA backend's ops of layers with quantised weights.
#include <torch/csrc/stable/accelerator.h>

#include <bit>
#include <optional>

#include "../../torch-ext/ops/plan.h"
#include "../../torch-ext/ops/quantized.h"
#include "../../torch-ext/ops/torch_gemm.h"
#include "../dense/fused_gemm.h"
#include "../dense/layer.h"
#include "../device.h"
#include "../pointwise/pointwise.h"
#include "choice.h"
#include "decode/decode.h"
#include "scaled/rounded_rows.h"

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
  return weight.code ? static_cast<const float*>(weight.code->const_data_ptr()) : nullptr;
}

const uint8_t* data_of(const QuantizedWeight& weight) {
  return static_cast<const uint8_t*>(weight.data.const_data_ptr());
}

Coding coding_of(const QuantizedWeight& weight) {
  switch (weight.data.scalar_type()) {
    case ScalarType::Float8_e4m3fn:
      return Coding::kFp8;
    case ScalarType::Char:
      return Coding::kInt8;
    default:
      return weight.blocked() ? Coding::kInt4 : Coding::kFourBits;
  }
}

}  // namespace

Tensor decoded(const QuantizedWeight& weight, ScalarType dtype) {
  const DeviceGuard device_guard(weight.data.get_device_index());
  const std::vector<int64_t> sizes{weight.n, weight.k};
  const Tensor out = new_dense(weight.data, sizes, dtype);
  const DType to = dtype_of(out, "dtype");
  if (weight.blocked()) {
    const auto* const scales = static_cast<const float*>(weight.scales.const_data_ptr());
    const BlockedElements elements{coding_of(weight), data_of(weight),   scales,       weight.n,
                                   weight.k,          weight.block_rows, weight.block, weight.factor()};
    check(launch_decode(elements, out.mutable_data_ptr(), to, current_stream(out)));
  } else {
    const CodedElements elements{data_of(weight), code_of(weight), scales_of(weight), weight.elements(), weight.block};
    check(launch_decode(elements, out.mutable_data_ptr(), to, current_stream(out)));
  }
  return out;
}

namespace {

// The scales of layers as floats: nested ones by one kernel for all.
class FloatScales {
 public:
  explicit FloatScales(const QuantizedLayers& layers) : layers_(layers) {}

  void unnest(cudaStream_t stream) {
    NestedScales nested[kMostNested];
    int count = 0;
    for (const QuantizedLayer& layer : layers_.all) {
      if (!layer.weight.nested()) continue;
      const int64_t blocks = layer.weight.blocks();
      auto* const floats = static_cast<float*>(unnested_[count].emplace(blocks * sizeof(float)).data());
      nested[count++] = {scales_of(layer.weight), blocks, floats};
    }
    check(launch_unnest(nested, stream));
  }

  // Those of a layer; null where they are nested, and nothing was unnested yet.
  const float* of(const QuantizedLayer& layer) const {
    if (!layer.weight.nested()) return static_cast<const float*>(layer.weight.scales.const_data_ptr());
    int place = 0;
    for (const QuantizedLayer* other = layers_.all.data(); other != &layer; ++other) place += other->weight.nested();
    return unnested_[place] ? static_cast<const float*>(unnested_[place]->data()) : nullptr;
  }

 private:
  const QuantizedLayers& layers_;
  std::optional<Scratch> unnested_[kMostNested];
};

// One layer, or gate and up.
struct Part {
  const QuantizedLayer& first;
  const QuantizedLayer* up;
  int64_t activation;
};

// The blocks of kCodedBlock elements of k that share a scale, as a power of two; nothing where kernels cannot read
// them.
std::optional<int> scale_shift(const QuantizedWeight& weight) {
  if (weight.blocked() && weight.block >= weight.k) return 31;
  const auto blocks = static_cast<uint64_t>(weight.block / kCodedBlock);
  if (weight.block % kCodedBlock != 0 || !std::has_single_bit(blocks) || (blocks > 1 && !weight.blocked())) return {};
  return std::countr_zero(blocks);
}

// A part by a kernel that reads its codes, or the reason why there is none.
struct CodedLayer {
  CodedProblem problem{};
  CodedPlan plan{};
  Refusal refusal;

  CodedLayer(const Part& part, const FloatScales& scales, const Matrix& a, int64_t rows, DType dtype, const Gpu& gpu)
      : refusal(choose(part, scales, a, rows, dtype, gpu)) {}

  bool fused() const { return refusal == Refusal::kNone; }
  bool scaled() const { return fused() && plan.scaled(); }

 private:
  Refusal choose(const Part& part, const FloatScales& scales, const Matrix& a, int64_t rows, DType dtype,
                 const Gpu& gpu) {
    const auto described = [&](const QuantizedLayer& layer) {
      const QuantizedWeight& weight = layer.weight;
      const int64_t stride = weight.blocked() ? weight.blocks_of_row() : weight.k / kCodedBlock;
      const auto scale_rows = static_cast<int>(std::min<int64_t>(weight.block_rows, weight.n));
      return CodedWeight{data_of(weight), code_of(weight), scales.of(layer),
                         stride,          scale_rows,      scale_shift(weight).value_or(0),
                         weight.factor()};
    };
    const QuantizedWeight& weight = part.first.weight;
    if (!scale_shift(weight) || (part.up != nullptr && !scale_shift(part.up->weight))) return Refusal::kOddFeatures;
    if (weight.n == 0) return Refusal::kEmpty;
    problem = {coding_of(weight),
               a,
               described(part.first),
               {},
               {nullptr, weight.n},
               rows,
               weight.n,
               weight.k,
               dtype,
               {},
               false};
    problem.epilogue.activation = part.activation;
    bool dense = describe_bias(part.first.bias, &problem.epilogue.bias);
    if (part.up != nullptr) {
      problem.up_weight = described(*part.up);
      dense = describe_bias(part.up->bias, &problem.epilogue.up_bias) && dense;
    }
    return dense ? choose_coded(problem, gpu, &plan) : Refusal::kStridedBias;
  }
};

// Gate and up of different formats, whose codes are not the same tensor, or whose blocks differ, are two products.
bool shares_format(const Part& part) {
  if (part.up == nullptr) return true;
  const QuantizedWeight &gate = part.first.weight, &up = part.up->weight;
  return coding_of(gate) == coding_of(up) && code_of(gate) == code_of(up) && gate.block_rows == up.block_rows &&
         gate.block == up.block && gate.factor() == up.factor();
}

Part first_of(const QuantizedLayers& layers, int64_t activation) { return {layers.first(), layers.up(), activation}; }
Part second_of(const QuantizedLayers& layers) { return {*layers.second(), nullptr, kNoActivation}; }

// The parts of a call, one after the other.
class Run {
 public:
  explicit Run(const QuantizedLayers& layers) : scales_(layers) {}

  Tensor operator()(const Tensor& x, const Part& part) {
    const TensorRows rows(x);
    const cudaStream_t stream = current_stream(x);
    const bool early = behind_ours_;
    behind_ours_ = false;
    const auto coded = [&] {
      return CodedLayer(part, scales_, matrix(rows), rows.rows, dtype_of(x, "x"), gpu(x.get_device_index()));
    };
    CodedLayer layer = coded();
    if (!layer.fused()) return run_decoded(x, part);
    if (!shares_format(part)) return run_apart(x, part);
    if (!unnested_) {
      scales_.unnest(stream);
      unnested_ = true;
      layer = coded();
    }
    const Tensor out = new_dense(x, with_last_size(x, part.first.weight.n));
    layer.problem.out.data = out.mutable_data_ptr();
    if (layer.scaled()) {
      const RoundedRows rounded(layer.problem, stream);
      multiply(layer, rounded.rows(), gpu(x.get_device_index()), stream);
    } else {
      layer.problem.starts_early = early;
      check(launch_coded(layer.problem, layer.plan, gpu(x.get_device_index()), stream));
    }
    behind_ours_ = true;
    return out;
  }

  // Both parts, with hidden values of e4m3 between them; nothing where a part does not take them.
  std::optional<Tensor> with_rounded_hidden(const Tensor& x, const Part& part, const Part& second) const {
    const TensorRows rows(x);
    const Gpu& on = gpu(x.get_device_index());
    const DType dtype = dtype_of(x, "x");
    const int64_t hidden = part.first.weight.n;
    const CodedLayer layer(part, scales_, matrix(rows), rows.rows, dtype, on);
    CodedLayer behind(second, scales_, {nullptr, hidden}, rows.rows, dtype, on);
    if (!layer.scaled() || layer.plan.split > 1 || !behind.scaled() || !shares_format(part)) return {};
    const cudaStream_t stream = current_stream(x);
    const Tensor out = new_dense(x, with_last_size(x, second.first.weight.n));
    behind.problem.out.data = out.mutable_data_ptr();
    const RoundedRows rounded(layer.problem, stream), between(rows.rows, hidden);
    check(launch_scaled(layer.problem, layer.plan, rounded.rows(), between.rows(), nullptr, on, stream));
    multiply(behind, between.rows(), on, stream);
    return out;
  }

 private:
  static void multiply(const CodedLayer& layer, const ScaledRows& a, const Gpu& gpu, cudaStream_t stream) {
    const int64_t parts = layer.plan.split > 1 ? layer.plan.split * layer.problem.m * layer.problem.n : 0;
    const Scratch sums(parts * static_cast<int64_t>(sizeof(float)));
    check(launch_scaled(layer.problem, layer.plan, a, {}, static_cast<float*>(sums.data()), gpu, stream));
  }

  static Tensor run_decoded(const Tensor& x, const Part& part) {
    const Tensor weight = decoded(part.first.weight, x.scalar_type());
    const OptionalTensor up =
        part.up != nullptr ? OptionalTensor(decoded(part.up->weight, x.scalar_type())) : std::nullopt;
    const OptionalTensor& up_bias = part.up != nullptr ? part.up->bias : kNoBias;
    return apply_layer(x, {weight, up ? &*up : nullptr, part.first.bias, up_bias, part.activation});
  }

  // Gate and up one after the other.
  Tensor run_apart(const Tensor& x, const Part& part) {
    const Tensor gate = (*this)(x, {part.first, nullptr, kNoActivation});
    behind_ours_ = false;
    const Tensor up = (*this)(x, {*part.up, nullptr, kNoActivation});
    behind_ours_ = false;
    const TensorRows of_gate(gate), of_up(up);
    check(launch_act_and_mul(matrix(of_gate), matrix(of_up), matrix(of_gate), of_gate.rows, of_gate.cols,
                             dtype_of(gate, "x"), part.activation, current_stream(gate)));
    return gate;
  }

  FloatScales scales_;
  bool unnested_ = false;
  bool behind_ours_ = false;  // the kernel before is one that reads codes, and wrote x
};

}  // namespace

Tensor run_quantized(const Tensor& x, const QuantizedLayers& layers, int64_t activation) {
  const DeviceGuard device_guard(x.get_device_index());
  Run part(layers);
  const Part first = first_of(layers, activation);
  if (layers.second() == nullptr) return part(x, first);
  const Part second = second_of(layers);
  if (std::optional<Tensor> out = part.with_rounded_hidden(x, first, second)) return *out;
  return part(part(x, first), second);
}

namespace {

void record(const Part& part, const FloatScales& scales, const Matrix& a, int64_t rows, DType dtype, const Gpu& gpu,
            PlanRecord* plan) {
  const CodedLayer layer(part, scales, a, rows, dtype, gpu);
  plan->layer();
  if (!layer.fused()) {
    plan->set("implementation", "decoded").set("refusal", code(layer.refusal));
    return;
  }
  plan->set("implementation", "quantized").set("kernel", name(layer.plan.loop));
  plan->set("block_m", layer.plan.tokens).set("split_k", layer.plan.split);
}

}  // namespace

std::string plan_quantized(const Tensor& x, const std::vector<OptionalTensor>& weights,
                           const std::vector<int64_t>& layouts, const std::vector<OptionalTensor>& biases,
                           int64_t activation, bool gated) {
  const std::vector<double> offsets(biases.size());
  const QuantizedLayers layers(x, weights, layouts, offsets, biases, activation, gated);
  PlanRecord plan;
  const TensorRows rows(x);
  const FloatScales scales(layers);
  const auto add = [&](const Part& part, const Matrix& a) {
    record(part, scales, a, rows.rows, dtype_of(x, "x"), gpu(x.get_device_index()), &plan);
  };
  add(first_of(layers, activation), matrix(rows));
  if (layers.second() != nullptr) add(second_of(layers), {nullptr, layers.first().weight.n});
  return plan.text();
}

}  // namespace fused_mlp
