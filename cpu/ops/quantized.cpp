// The CPU backend's ops of layers with quantised weights: they are decoded, and the layers are those of other weights.
#include "../../torch-ext/ops/quantized.h"

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Float8_e4m3fn.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <array>
#include <bit>

#include "../../torch-ext/operands/zero_point.h"
#include "../../torch-ext/ops/plan.h"
#include "../layers.h"

namespace fused_mlp {
namespace {

using torch::headeronly::Float8_e4m3fn;
using torch::headeronly::ScalarType;

float scale_of(const PackedWeight& weight, int64_t block) {
  if (!weight.nested()) return static_cast<const float*>(weight.scales)[block];
  const uint8_t code = static_cast<const uint8_t*>(weight.scales)[block];
  const volatile float product =
      weight.nested_code[code] * weight.nested_scales[block / weight.nested_block];  // rounded by itself
  return product + static_cast<float>(weight.offset);
}

// A block has 16 values, which are rounded once for all its elements.
template <typename T>
void decode_blocks(const PackedWeight& weight, int64_t first, int64_t last, T* out) {
  const auto* const data = static_cast<const uint8_t*>(weight.data);
  for (int64_t block = first; block < last; ++block) {
    const float scale = scale_of(weight, block);
    T values[16];
    for (int i = 0; i < 16; ++i) values[i] = static_cast<T>(weight.code[i] * scale);
    int64_t i = block * weight.block;
    const int64_t end = std::min(weight.elements(), i + weight.block);
    if (i < end && i % 2 == 1) {
      out[i] = values[data[i / 2] & 15];
      ++i;
    }
    for (; i + 1 < end; i += 2) {
      const uint8_t pair = data[i / 2];
      out[i] = values[pair >> 4];
      out[i + 1] = values[pair & 15];
    }
    if (i < end) out[i] = values[data[i / 2] >> 4];
  }
}

// The values of a format's codes, of a byte or of half of one.
std::array<float, 256> values_of(const PackedWeight& weight) {
  std::array<float, 256> values;
  for (int i = 0; i < 256; ++i) {
    if (weight.coding == Coding::kInt4) {
      values[i] = static_cast<float>(i % 16);
    } else if (weight.coding == Coding::kInt8) {
      values[i] = static_cast<float>(static_cast<int8_t>(i));
    } else {
      values[i] = Float8_e4m3fn(static_cast<uint8_t>(i), Float8_e4m3fn::from_bits());
    }
  }
  return values;
}

template <typename T>
void decode_rows(const PackedWeight& weight, const std::array<float, 256>& values, int64_t first, int64_t last,
                 T* out) {
  const auto* const data = static_cast<const uint8_t*>(weight.data);
  const auto* const scales = static_cast<const float*>(weight.scales);
  const bool halves = weight.coding == Coding::kInt4;
  for (int64_t row = first; row < last; ++row) {
    const float* const of_row = scales + row / weight.block_rows * weight.blocks_of_row();
    for (int64_t begin = 0; begin < weight.k; begin += weight.block) {
      const auto bits = std::bit_cast<uint32_t>(of_row[begin / weight.block]), zeros = halves ? kZeroBits : 0;
      const float scale = std::bit_cast<float>(bits & ~zeros) * weight.factor();
      const auto zero = static_cast<float>(bits & zeros);
      const int64_t end = std::min(weight.k, begin + weight.block);
      for (int64_t i = row * weight.k + begin; i < row * weight.k + end; ++i) {
        const int code = halves ? data[i / 2] >> i % 2 * 4 & 15 : data[i];
        out[i] = static_cast<T>((values[code] - zero) * scale);
      }
    }
  }
}

}  // namespace

Tensor decoded(const PackedWeight& weight, const Tensor& like, ScalarType dtype) {
  const std::vector<int64_t> sizes{weight.n, weight.k};
  const Tensor out = new_dense(like, sizes, dtype);
  const auto fill = [&]<typename T>(T*) {
    auto* const elements = static_cast<T*>(out.mutable_data_ptr());
    if (weight.blocked()) {
      const std::array<float, 256> values = values_of(weight);
      torch::stable::parallel_for(
          0, weight.n, ceil_div(kGrain, std::max<int64_t>(1, weight.k)),
          [&](int64_t begin, int64_t end) { decode_rows(weight, values, begin, end, elements); });
    } else {
      torch::stable::parallel_for(0, weight.blocks(), ceil_div(kGrain, weight.block),
                                  [&](int64_t begin, int64_t end) { decode_blocks(weight, begin, end, elements); });
    }
  };
  switch (dtype) {
    case ScalarType::Float:
      fill(static_cast<float*>(nullptr));
      break;
    case ScalarType::Half:
      fill(static_cast<torch::headeronly::Half*>(nullptr));
      break;
    case ScalarType::BFloat16:
      fill(static_cast<torch::headeronly::BFloat16*>(nullptr));
      break;
    default:
      STD_TORCH_CHECK(false, "dtype must be float32, float16 or bfloat16, not ", torch::headeronly::toString(dtype));
  }
  return out;
}

Tensor run_quantized(const Tensor& x, const QuantizedLayers& layers, int64_t activation) {
  dtype_of(x, "x");
  const auto of_dtype = [&](const QuantizedLayer& layer) { return decoded(layer.weight.packed, x, x.scalar_type()); };
  const Tensor first = of_dtype(layers.first());
  const OptionalTensor up = layers.gated ? OptionalTensor(of_dtype(*layers.up())) : std::nullopt;
  const HiddenLayer hidden{first, layers.first().bias, up ? &*up : nullptr, up ? &layers.up()->bias : nullptr,
                           activation};
  if (layers.second() == nullptr) return run_layers(x, hidden, nullptr);
  const Tensor second = of_dtype(*layers.second());
  const OutputLayer output{second, layers.second()->bias};
  return run_layers(x, hidden, &output);
}

void run_packed(const PlainMlp& mlp, const Matrix& x, void* out) {
  const ScalarType dtype = mlp.dtype == DType::kFloat32   ? ScalarType::Float
                           : mlp.dtype == DType::kFloat16 ? ScalarType::Half
                                                          : ScalarType::BFloat16;
  const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU, -1);
  const auto rows = [&](void* data, int64_t cols, int64_t stride) {
    return torch::stable::from_blob(data, {mlp.rows, cols}, {stride, 1}, cpu, dtype);
  };
  const auto bias = [&](const void* data, const PlainLayer& layer) {
    if (data == nullptr) return OptionalTensor();
    return OptionalTensor(torch::stable::from_blob(const_cast<void*>(data), {layer.out}, {1}, cpu, dtype));
  };
  const PlainLayer &first = mlp.layers[0], &last = mlp.layers[mlp.count - 1];
  const Tensor given = rows(x.data, mlp.in, x.row_stride), result = rows(out, last.out, last.out);
  const OptionalTensor up =
      first.up_packed != nullptr ? OptionalTensor(decoded(*first.up_packed, given, dtype)) : std::nullopt;
  const OptionalTensor of_first = bias(first.bias, first), of_up = bias(first.up_bias, first);
  const Tensor weight = decoded(*first.packed, given, dtype);
  const HiddenLayer hidden{weight, of_first, up ? &*up : nullptr, up ? &of_up : nullptr, first.activation};
  if (mlp.count == 1) return run_rows(given, hidden, nullptr, result);
  const Tensor second = decoded(*last.packed, given, dtype);
  const OptionalTensor of_second = bias(last.bias, last);
  const OutputLayer output{second, of_second};
  run_rows(given, hidden, &output, result);
}

std::string plan_quantized(const Tensor& x, const std::vector<OptionalTensor>& weights,
                           const std::vector<int64_t>& layouts, const std::vector<OptionalTensor>& biases,
                           int64_t activation, bool gated) {
  const std::vector<double> offsets(biases.size());
  const QuantizedLayers layers(x, weights, layouts, offsets, biases, activation, gated);
  PlanRecord plan;
  const int64_t count = layers.second() == nullptr ? 1 : 2;
  for (int64_t i = 0; i < count; ++i) plan.layer().set("implementation", "decoded");
  return plan.text();
}

}  // namespace fused_mlp
