// The CPU backend's ops for layers with quantised weights. Kernels decode the weights in registers, or they are decoded
// first and the layers run like those with plain weights.
#include <algorithm>
#include <array>
#include <bit>
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
using torch::headeronly::ScalarType;

const torch::stable::Device kCpu(torch::headeronly::DeviceType::CPU, -1);

constexpr int64_t kColumns = 32;  // number of columns that kernels decode at once

constexpr int kAll = 62;  // the shift for a block of all columns or rows: every index becomes zero

std::optional<int> shift_of(int64_t block, int64_t all) {
  if (block >= all) return kAll;
  if (!std::has_single_bit(static_cast<uint64_t>(block))) return std::nullopt;
  return std::countr_zero(static_cast<uint64_t>(block));
}

constexpr auto kIntegers = [] {
  std::array<float, 16> values{};
  for (int i = 0; i < 16; ++i) values[i] = static_cast<float>(i);
  return values;
}();

Format format_of(Coding coding) {
  switch (coding) {
    case Coding::kFourBits:
      return Format::kHighFirst;
    case Coding::kInt4:
      return Format::kLowFirst;
    case Coding::kInt8:
      return Format::kInt8;
    case Coding::kFp8:
    case Coding::kInt4Tiles:  // no kernel reads it
      break;
  }
  return Format::kFp8;
}

// A weight in the form that the kernels read, or nothing.
std::optional<Codes> codes_of(const PackedWeight& weight) {
  const int64_t k = weight.k;
  if (weight.elements() == 0 || k % kColumns != 0 || weight.in_tiles()) return std::nullopt;
  // If blocks run on from row to row, a block is a part of a row or whole rows.
  const bool runs_on = !weight.blocked(), of_rows = runs_on && weight.block > k;
  if (runs_on && (of_rows ? weight.block % k : k % weight.block) != 0) return std::nullopt;
  const int64_t block_rows = of_rows ? weight.block / k : weight.block_rows;
  const std::optional<int> rows_shift = shift_of(block_rows, weight.n), columns_shift = shift_of(weight.block, k);
  const std::optional<int> nested_shift = weight.nested() ? shift_of(weight.nested_block, weight.blocks()) : 0;
  if (!rows_shift || !columns_shift || !nested_shift || weight.block < kColumns) return std::nullopt;
  return Codes{format_of(weight.coding),
               static_cast<const uint8_t*>(weight.data),
               k,
               runs_on ? weight.code : kIntegers.data(),
               *rows_shift,
               *columns_shift,
               weight.blocks_of_row(),
               weight.scales,
               weight.factor(),
               weight.nested_scales,
               weight.nested_code,
               *nested_shift,
               static_cast<float>(weight.offset)};
}

// The layers of a call with their weights and dense biases: first, or gate and up if `gated`, and perhaps a second.
struct CodedLayers {
  std::vector<const PackedWeight*> weights;
  std::vector<OptionalTensor> biases;
  bool gated;
  int64_t activation;

  CodedLayers(const QuantizedLayers& layers, int64_t activation) : gated(layers.gated), activation(activation) {
    for (const QuantizedLayer& layer : layers.all) add(&layer.weight.packed, layer.bias);
  }
  CodedLayers(const PlainMlp& mlp, ScalarType dtype)
      : gated(mlp.layers[0].up_packed != nullptr), activation(mlp.layers[0].activation) {
    const auto vector = [&](const void* data, int64_t size) {
      if (data == nullptr) return OptionalTensor();
      return OptionalTensor(torch::stable::from_blob(const_cast<void*>(data), {size}, {1}, kCpu, dtype));
    };
    const PlainLayer &first = mlp.layers[0], &second = mlp.layers[1];
    add(first.packed, vector(first.bias, first.out));
    if (gated) add(first.up_packed, vector(first.up_bias, first.out));
    if (mlp.count > 1) add(second.packed, vector(second.bias, second.out));
  }

  bool has_second() const { return weights.size() > (gated ? 2u : 1u); }

 private:
  void add(const PackedWeight* weight, const OptionalTensor& bias) {
    weights.push_back(weight);
    biases.push_back(bias);
  }
};

// Their codes as kernels read them; nothing if one of them is not readable.
std::optional<std::vector<Codes>> codes_of(const CodedLayers& layers) {
  std::vector<Codes> found;
  for (const PackedWeight* const weight : layers.weights) {
    const std::optional<Codes> codes = codes_of(*weight);
    if (!codes) return std::nullopt;
    found.push_back(*codes);
  }
  if (layers.gated && found[0].format != found[1].format) return std::nullopt;
  return found;
}

// The layers in the types Layer and Projection of some kernels.
template <typename Layer, typename Make>
std::pair<Layer, Layer> layers_for(const CodedLayers& layers, const std::vector<Codes>& codes, const Make& make) {
  Layer hidden = make(*layers.weights[0], layers.activation), down{};
  const auto set = [&](auto& projection, size_t i) {
    projection = {};
    projection.codes = &codes[i];
    using Bias = decltype(projection.bias);
    if (const OptionalTensor& bias = layers.biases[i]) projection.bias = static_cast<Bias>(bias->const_data_ptr());
  };
  set(hidden.gate, 0);
  hidden.gated = layers.gated;
  if (layers.gated) set(hidden.up, 1);
  if (!layers.has_second()) return {hidden, down};
  down = make(*layers.weights.back(), static_cast<int64_t>(Activation::kLinear));
  set(down.gate, codes.size() - 1);
  return {hidden, down};
}

enum class Way { kDecoded, kVectors, kTiles };

// How the layers are computed: by vectors for few rows, on tiles, or decoded first.
Way way_of(DType dtype, int64_t rows, const CodedLayers& layers, bool has_codes) {
  if (!has_codes) return Way::kDecoded;
  const bool has_features = std::all_of(layers.weights.begin(), layers.weights.end(), [](const PackedWeight* weight) {
    return weight->n >= few_rows::kFeaturesOfCodes;
  });
  if (has_features && few_rows::take_codes(dtype, rows)) return Way::kVectors;
  return dtype == DType::kBFloat16 && isa() == Isa::kAmx ? Way::kTiles : Way::kDecoded;
}

void run_codes(const Tensor& x, const CodedLayers& layers, const std::vector<Codes>& codes, Way way,
               const Tensor& out) {
  const TensorRows rows(x);
  if (way == Way::kVectors) {
    const auto [hidden, down] = layers_for<few_rows::Layer>(layers, codes, [&](const PackedWeight& of, int64_t act) {
      return few_rows::Layer{dtype_of(x, "x"), {}, {}, false, of.k, of.n, act};
    });
    const Matrix from{const_cast<void*>(rows.tensor.const_data_ptr()), rows.row_stride};
    return few_rows::run(from, rows.rows, hidden, layers.has_second() ? &down : nullptr, out.mutable_data_ptr());
  }
#if defined(__x86_64__)
  const auto [hidden, down] = layers_for<amx::Layer>(
      layers, codes, [](const PackedWeight& of, int64_t act) { return amx::Layer{{}, {}, false, of.k, of.n, act}; });
  amx::run(rows.tensor, rows.row_stride, rows.rows, hidden, layers.has_second() ? &down : nullptr, out, {});
#endif
}

// Computes layers of x [rows, in] into out [rows, features].
void run(const Tensor& x, const CodedLayers& layers, const Tensor& out) {
  const auto codes = codes_of(layers);
  const Way way = way_of(dtype_of(x, "x"), x.size(0), layers, codes.has_value());
  if (way != Way::kDecoded) return run_codes(x, layers, *codes, way, out);
  const auto weight = [&](size_t i) { return decoded(*layers.weights[i], x, x.scalar_type()); };
  const Tensor first = weight(0);
  const OptionalTensor up = layers.gated ? OptionalTensor(weight(1)) : std::nullopt;
  const HiddenLayer hidden{first, layers.biases[0], up ? &*up : nullptr, up ? &layers.biases[1] : nullptr,
                           layers.activation};
  if (!layers.has_second()) return run_rows(x, hidden, nullptr, out);
  const Tensor second = weight(layers.weights.size() - 1);
  const OutputLayer output{second, layers.biases.back()};
  run_rows(x, hidden, &output, out);
}

}  // namespace

Tensor run_quantized(const Tensor& x, const QuantizedLayers& layers, int64_t activation) {
  const Tensor flat = flatten_rows(x);
  const CodedLayers coded(layers, activation);
  const Tensor result = new_result(x, coded.weights.back()->n);
  if (result.numel() > 0) run(flat, coded, matrix_of(result, flat.size(0)));
  return result;
}

void run_packed(const PlainMlp& mlp, const Matrix& x, void* out) {
  const ScalarType dtype = mlp.dtype == DType::kFloat32   ? ScalarType::Float
                           : mlp.dtype == DType::kFloat16 ? ScalarType::Half
                                                          : ScalarType::BFloat16;
  const auto rows = [&](void* data, int64_t cols, int64_t stride) {
    return torch::stable::from_blob(data, {mlp.rows, cols}, {stride, 1}, kCpu, dtype);
  };
  const int64_t features = mlp.layers[mlp.count - 1].out;
  run(rows(x.data, mlp.in, x.row_stride), CodedLayers(mlp, dtype), rows(out, features, features));
}

std::string plan_quantized(const Tensor& x, const std::vector<OptionalTensor>& weights,
                           const std::vector<int64_t>& layouts, const std::vector<OptionalTensor>& biases,
                           int64_t activation, bool gated) {
  const std::vector<double> offsets(biases.size());
  const QuantizedLayers layers(x, weights, layouts, offsets, biases, activation, gated);
  const CodedLayers coded(layers, activation);
  const Way way = way_of(dtype_of(x, "x"), count_rows(x), coded, codes_of(coded).has_value());
  PlanRecord plan;
  const int64_t count = coded.has_second() ? 2 : 1;
  for (int64_t i = 0; i < count; ++i) {
    plan.layer().set("implementation", way == Way::kDecoded ? "decoded" : "quantized");
    if (way == Way::kTiles) plan.set("kernel", "amx");
    if (way == Way::kVectors) plan.set("kernel", name(std::min(isa(), Isa::kAvx512)));
  }
  return plan.text();
}

}  // namespace fused_mlp
