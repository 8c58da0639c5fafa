// The CUDA backend's ops for layers with quantised weights.

#include <array>
#include <optional>

#include "../../torch-ext/ops/plan.h"
#include "../../torch-ext/ops/quantized.h"
#include "../../torch-ext/ops/torch_gemm.h"
#include "../dense/fused_gemm.h"
#include "../pointwise/pointwise.h"
#include "by_rows/products.h"
#include "coded_layer.h"
#include "scaled/rounded_rows.h"

namespace fused_mlp {

using torch::headeronly::ScalarType;

Tensor decoded(const PackedWeight& weight, const Tensor& like, ScalarType dtype) {
  const DeviceGuard device_guard(weight.device);
  const std::vector<int64_t> sizes{weight.n, weight.k};
  const Tensor out = new_dense(like, sizes, dtype);
  const DType to = dtype_of(out, "dtype");
  if (weight.in_tiles()) {
    check(launch_decode_tiles(weight, out.mutable_data_ptr(), to, current_stream(out)));
  } else if (weight.blocked()) {
    const auto* const scales = static_cast<const float*>(weight.scales);
    const BlockedElements elements{weight.coding, data_of(weight),   scales,       weight.n,
                                   weight.k,      weight.block_rows, weight.block, weight.factor()};
    check(launch_decode(elements, out.mutable_data_ptr(), to, current_stream(out)));
  } else {
    const CodedElements elements{data_of(weight), weight.code, scales_of(weight), weight.elements(), weight.block};
    check(launch_decode(elements, out.mutable_data_ptr(), to, current_stream(out)));
  }
  return out;
}

namespace {

const void* data_of(const OptionalTensor& bias) { return bias ? bias->const_data_ptr() : nullptr; }

// A part with the tensors of its biases.
struct LayerPart {
  const QuantizedLayer* layer;
  const QuantizedLayer* up;
  int64_t activation;

  Part part() const {
    const bool gated = up != nullptr;
    return {&layer->weight.packed, gated ? &up->weight.packed : nullptr, data_of(layer->bias),
            gated ? data_of(up->bias) : nullptr, activation};
  }
};

LayerPart first_of(const QuantizedLayers& layers, int64_t activation) {
  return {&layers.first(), layers.up(), activation};
}
LayerPart second_of(const QuantizedLayers& layers) { return {layers.second(), nullptr, kNoActivation}; }

// The weights of consecutive layers.
struct Weights {
  std::array<const PackedWeight*, kMostNested> all{};
  size_t count = 0;

  explicit Weights(const QuantizedLayers& layers) {
    for (const QuantizedLayer& layer : layers.all) all[count++] = &layer.weight.packed;
  }
  std::span<const PackedWeight* const> span() const { return {all.data(), count}; }
};

// The parts of a call, one after the other.
class Run {
 public:
  explicit Run(const QuantizedLayers& layers) : weights_(layers), scales_(weights_.span()) {}

  Tensor operator()(const Tensor& x, const LayerPart& layers) {
    const TensorRows rows(x);
    const cudaStream_t stream = current_stream(x);
    const bool early = behind_ours_;
    behind_ours_ = false;
    const Part part = layers.part();
    CodedLayer layer(part, scales_, matrix(rows), rows.rows, dtype_of(x, "x"), gpu(x.get_device_index()));
    if (!layer.fused()) return run_decoded(x, layers);
    if (!shares_format(part)) return run_apart(x, layers);
    if (layer.runs(CodedLoop::kScaledMm)) return run_by_rows(x, layers, nullptr);
    if (!unnested_) scales_.unnest(stream);
    unnested_ = true;
    layer.take(part, scales_);
    const Tensor out = new_dense(x, with_last_size(x, part.first->n));
    layer.problem.out.data = out.mutable_data_ptr();
    if (layer.runs(CodedLoop::kScaled)) {
      const RoundedRows rounded(layer.problem, stream);
      multiply_rounded(layer, rounded.rows(), gpu(x.get_device_index()), stream);
    } else {
      layer.problem.starts_early = early;
      check(launch_coded(layer.problem, layer.plan, gpu(x.get_device_index()), stream));
    }
    behind_ours_ = true;
    return out;
  }

  // Both parts, with hidden values in e4m3 between them; nothing if a part does not support that.
  std::optional<Tensor> with_rounded_hidden(const Tensor& x, const LayerPart& first, const LayerPart& last) const {
    const Part part = first.part(), second = last.part();
    const TensorRows rows(x);
    const Gpu& on = gpu(x.get_device_index());
    const DType dtype = dtype_of(x, "x");
    const int64_t hidden = part.first->n;
    const CodedLayer layer(part, scales_, matrix(rows), rows.rows, dtype, on);
    CodedLayer behind(second, scales_, {nullptr, hidden}, rows.rows, dtype, on);
    if (!shares_format(part)) return {};
    if (layer.runs(CodedLoop::kScaledMm) && behind.runs(CodedLoop::kScaledMm)) {
      return run_by_rows(x, first, last.layer);
    }
    if (!layer.runs(CodedLoop::kScaled) || !behind.runs(CodedLoop::kScaled)) return {};
    const Tensor out = new_dense(x, with_last_size(x, second.first->n));
    behind.problem.out.data = out.mutable_data_ptr();
    return launch_with_rounded_hidden(layer, behind, on, current_stream(x)) ? std::optional(out) : std::nullopt;
  }

 private:
  // One layer, or gate and up, and a second one if there is one, by torch's products of rounded rows.
  static Tensor run_by_rows(const Tensor& x, const LayerPart& part, const QuantizedLayer* second) {
    const TensorRows rows(x);
    const auto product = [&](const RowsInE4m3& of, const QuantizedLayer& layer, const Tensor& out) {
      of.multiply(layer, matrix_view(out, {rows.rows, layer.weight.packed.n}, {layer.weight.packed.n, 1}));
      return out;
    };
    const auto sized = [&](const QuantizedLayer& layer) {
      return new_dense(x, with_last_size(x, layer.weight.packed.n));
    };
    const RowsInE4m3 rounded(x, matrix(rows), kNoMatrix, rows.rows, rows.cols, kNoActivation);
    const Tensor gate = product(rounded, *part.layer, sized(*part.layer));
    const OptionalTensor up =
        part.up != nullptr ? OptionalTensor(product(rounded, *part.up, sized(*part.up))) : std::nullopt;
    const int64_t features = part.layer->weight.packed.n;
    const Matrix of_gate{gate.mutable_data_ptr(), features};
    const Matrix of_up = up ? Matrix{up->mutable_data_ptr(), features} : kNoMatrix;
    if (second != nullptr) {
      const RowsInE4m3 hidden(x, of_gate, of_up, rows.rows, features, part.activation);
      return product(hidden, *second, sized(*second));
    }
    if (up || part.activation != kNoActivation) {
      check(launch_act_and_mul(of_gate, of_up, of_gate, rows.rows, features, dtype_of(x, "x"), part.activation,
                               current_stream(x)));
    }
    return gate;
  }

  static Tensor run_decoded(const Tensor& x, const LayerPart& part) {
    const auto of_dtype = [&](const QuantizedLayer* layer) {
      return decoded(layer->weight.packed, x, x.scalar_type());
    };
    const Tensor weight = of_dtype(part.layer);
    const OptionalTensor up = part.up != nullptr ? OptionalTensor(of_dtype(part.up)) : std::nullopt;
    const OptionalTensor& up_bias = part.up != nullptr ? part.up->bias : kNoBias;
    return apply_layer(x, {weight, up ? &*up : nullptr, part.layer->bias, up_bias, part.activation});
  }

  // Computes gate and up one after the other.
  Tensor run_apart(const Tensor& x, const LayerPart& part) {
    const Tensor gate = (*this)(x, {part.layer, nullptr, kNoActivation});
    behind_ours_ = false;
    const Tensor up = (*this)(x, {part.up, nullptr, kNoActivation});
    behind_ours_ = false;
    const TensorRows of_gate(gate), of_up(up);
    check(launch_act_and_mul(matrix(of_gate), matrix(of_up), matrix(of_gate), of_gate.rows, of_gate.cols,
                             dtype_of(gate, "x"), part.activation, current_stream(gate)));
    return gate;
  }

  const Weights weights_;
  FloatScales scales_;
  bool unnested_ = false;
  bool behind_ours_ = false;  // the previous kernel reads codes, and wrote x
};

}  // namespace

Tensor run_quantized(const Tensor& x, const QuantizedLayers& layers, int64_t activation) {
  const DeviceGuard device_guard(x.get_device_index());
  Run part(layers);
  const LayerPart first = first_of(layers, activation);
  if (layers.second() == nullptr) return part(x, first);
  const LayerPart second = second_of(layers);
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
  const Weights packed(layers);
  const FloatScales scales(packed.span());
  const auto add = [&](const LayerPart& part, const Matrix& a) {
    record(part.part(), scales, a, rows.rows, dtype_of(x, "x"), gpu(x.get_device_index()), &plan);
  };
  add(first_of(layers, activation), matrix(rows));
  if (layers.second() != nullptr) add(second_of(layers), {nullptr, layers.first().weight.packed.n});
  return plan.text();
}

}  // namespace fused_mlp
