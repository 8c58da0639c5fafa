// The CPU backend's ops of layers with quantised weights: by kernels that decode them in registers, or decoded first,
// as the layers of other weights.
#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "../../torch-ext/operands/tensor_rows.h"
#include "../../torch-ext/ops/plan.h"
#include "../../torch-ext/ops/quantized.h"
#include "../amx/amx_mlp.h"
#include "../few_rows/few_rows_mlp.h"
#include "../isa/isa.h"
#include "../layers.h"
#include "codes.h"

namespace fused_mlp {
namespace {

using quantized::Codes;
using quantized::Format;

constexpr int64_t kColumns = 32;  // that kernels decode at once

constexpr int kAll = 62;  // the shift of a block of all columns, or rows: no index behind it is more than zero

std::optional<int> shift_of(int64_t block, int64_t all) {
  if (block >= all) return kAll;
  if (!std::has_single_bit(static_cast<uint64_t>(block))) return std::nullopt;
  return std::countr_zero(static_cast<uint64_t>(block));
}

const float* floats(const OptionalTensor& tensor) {
  return tensor ? static_cast<const float*>(tensor->const_data_ptr()) : nullptr;
}

constexpr auto kIntegers = [] {
  std::array<float, 16> values{};
  for (int i = 0; i < 16; ++i) values[i] = static_cast<float>(i);
  return values;
}();

// A weight as the kernels read it, or nothing.
std::optional<Codes> codes_of(const QuantizedWeight& weight) {
  const int64_t k = weight.k;
  if (weight.elements() == 0 || k % kColumns != 0) return std::nullopt;
  // Blocks that run on from row to row have parts of a row, or whole rows.
  const bool runs_on = !weight.blocked(), of_rows = runs_on && weight.block > k;
  if (runs_on && (of_rows ? weight.block % k : k % weight.block) != 0) return std::nullopt;
  const int64_t block_rows = of_rows ? weight.block / k : weight.block_rows;
  const std::optional<int> rows_shift = shift_of(block_rows, weight.n), columns_shift = shift_of(weight.block, k);
  const std::optional<int> nested_shift = weight.nested() ? shift_of(weight.nested_block, weight.blocks()) : 0;
  if (!rows_shift || !columns_shift || !nested_shift || weight.block < kColumns) return std::nullopt;
  const Format format = runs_on         ? Format::kHighFirst
                        : weight.int4() ? Format::kLowFirst
                        : weight.int8() ? Format::kInt8
                                        : Format::kFp8;
  return Codes{format,
               static_cast<const uint8_t*>(weight.data.const_data_ptr()),
               k,
               runs_on ? floats(weight.code) : kIntegers.data(),
               *rows_shift,
               *columns_shift,
               weight.blocks_of_row(),
               weight.scales.const_data_ptr(),
               weight.factor(),
               floats(weight.nested_scales),
               floats(weight.nested_code),
               *nested_shift,
               static_cast<float>(weight.offset)};
}

// Layers as kernels read them; none if they read one of them not.
struct ReadLayers {
  std::vector<Codes> codes;
  std::vector<OptionalTensor> biases;  // dense
  bool gated;
  int64_t activation;
  int64_t least_features = std::numeric_limits<int64_t>::max();

  static std::optional<ReadLayers> of(const QuantizedLayers& layers, int64_t activation) {
    ReadLayers read{{}, {}, layers.gated, activation};
    for (const QuantizedLayer& layer : layers.all) {
      const std::optional<Codes> codes = codes_of(layer.weight);
      if (!codes) return std::nullopt;
      read.codes.push_back(*codes);
      read.least_features = std::min(read.least_features, layer.weight.n);
      const OptionalTensor& bias = layer.bias;
      read.biases.push_back(bias && !bias->is_contiguous() ? torch::stable::contiguous(*bias) : bias);
    }
    if (layers.gated && read.codes[0].format != read.codes[1].format) return std::nullopt;
    return read;
  }

  // True if each layer has a block of features of the kernels of few rows.
  bool has_features() const { return least_features >= few_rows::kFeaturesOfCodes; }
  bool has_second() const { return codes.size() > (gated ? 2u : 1u); }
};

// The layers for kernels that call what they are made of Layer and Projection.
template <typename Layer, typename Make>
std::pair<Layer, Layer> layers_for(const QuantizedLayers& layers, const ReadLayers& read, const Make& make) {
  const QuantizedWeight& first = layers.first().weight;
  Layer hidden = make(first, read.activation), down{};
  const auto set = [&](auto& projection, size_t i) {
    const OptionalTensor& bias = read.biases[i];
    projection = {};
    projection.codes = &read.codes[i];
    using Bias = decltype(projection.bias);
    if (bias) projection.bias = static_cast<Bias>(bias->const_data_ptr());
  };
  set(hidden.gate, 0);
  hidden.gated = read.gated;
  if (read.gated) set(hidden.up, 1);
  if (!read.has_second()) return {hidden, down};
  down = make(layers.second()->weight, static_cast<int64_t>(Activation::kLinear));
  set(down.gate, read.codes.size() - 1);
  return {hidden, down};
}

enum class Way { kDecoded, kVectors, kTiles };

// The way in which layers are computed: by vectors for few rows, on tiles, or decoded first.
Way way_of(DType dtype, int64_t rows, const std::optional<ReadLayers>& read) {
  if (!read) return Way::kDecoded;
  if (few_rows::take_codes(dtype, rows) && read->has_features()) return Way::kVectors;
  return dtype == DType::kBFloat16 && isa() == Isa::kAmx ? Way::kTiles : Way::kDecoded;
}

void run_codes(const Tensor& x, const QuantizedLayers& layers, const ReadLayers& read, Way way, const Tensor& out) {
  const TensorRows rows(x);
  if (way == Way::kVectors) {
    const auto [hidden, down] = layers_for<few_rows::Layer>(layers, read, [&](const QuantizedWeight& of, int64_t act) {
      return few_rows::Layer{dtype_of(x, "x"), {}, {}, false, of.k, of.n, act};
    });
    const Matrix from{const_cast<void*>(rows.tensor.const_data_ptr()), rows.row_stride};
    return few_rows::run(from, rows.rows, hidden, read.has_second() ? &down : nullptr, out.mutable_data_ptr());
  }
#if defined(__x86_64__)
  const auto [hidden, down] = layers_for<amx::Layer>(
      layers, read, [](const QuantizedWeight& of, int64_t act) { return amx::Layer{{}, {}, false, of.k, of.n, act}; });
  amx::run(rows.tensor, rows.row_stride, rows.rows, hidden, read.has_second() ? &down : nullptr, out, {});
#endif
}

}  // namespace

Tensor run_quantized(const Tensor& x, const QuantizedLayers& layers, int64_t activation) {
  const DType dtype = dtype_of(x, "x");
  const Tensor flat = flatten_rows(x);
  const Tensor result = new_result(x, (layers.second() ? *layers.second() : layers.first()).weight.n);
  if (result.numel() == 0) return result;
  const Tensor out = matrix_of(result, flat.size(0));
  const std::optional<ReadLayers> read = ReadLayers::of(layers, activation);
  if (const Way way = way_of(dtype, flat.size(0), read); way != Way::kDecoded) {
    run_codes(flat, layers, *read, way, out);
    return result;
  }
  const auto of_dtype = [&](const QuantizedLayer& layer) { return decoded(layer.weight, x.scalar_type()); };
  const Tensor first = of_dtype(layers.first());
  const OptionalTensor up = layers.gated ? OptionalTensor(of_dtype(*layers.up())) : std::nullopt;
  const HiddenLayer hidden{first, layers.first().bias, up ? &*up : nullptr, up ? &layers.up()->bias : nullptr,
                           activation};
  if (layers.second() == nullptr) {
    run_rows(flat, hidden, nullptr, out);
    return result;
  }
  const Tensor second = of_dtype(*layers.second());
  const OutputLayer output{second, layers.second()->bias};
  run_rows(flat, hidden, &output, out);
  return result;
}

std::string plan_quantized(const Tensor& x, const std::vector<OptionalTensor>& weights,
                           const std::vector<int64_t>& layouts, const std::vector<OptionalTensor>& biases,
                           int64_t activation, bool gated) {
  const std::vector<double> offsets(biases.size());
  const QuantizedLayers layers(x, weights, layouts, offsets, biases, activation, gated);
  const DType dtype = dtype_of(x, "x");
  const Way way = way_of(dtype, count_rows(x), ReadLayers::of(layers, activation));
  PlanRecord plan;
  const int64_t count = layers.second() == nullptr ? 1 : 2;
  for (int64_t i = 0; i < count; ++i) {
    plan.layer().set("implementation", way == Way::kDecoded ? "decoded" : "quantized");
    if (way == Way::kTiles) plan.set("kernel", "amx");
    if (way == Way::kVectors) plan.set("kernel", name(std::min(isa(), Isa::kAvx512)));
  }
  return plan.text();
}

}  // namespace fused_mlp
