// Quantised weights decoded to tensors.
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Float8_e4m3fn.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

#include "../../torch-ext/operands/zero_point.h"
#include "../../torch-ext/ops/quantized.h"
#include "../layers.h"

namespace fused_mlp {
namespace {

using torch::headeronly::Float8_e4m3fn;
using torch::headeronly::ScalarType;

float scale_of(const PackedWeight& weight, int64_t block) {
  if (!weight.nested()) return static_cast<const float*>(weight.scales)[block];
  const uint8_t code = static_cast<const uint8_t*>(weight.scales)[block];
  const volatile float product =
      weight.nested_code[code] * weight.nested_scales[block / weight.nested_block];  // rounded on its own
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

// The values of a format's codes, for a byte or half a byte.
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

// Rows of int4 in tiles.
template <typename T>
void decode_tiles(const PackedWeight& weight, int64_t first, int64_t last, T* out) {
  const Tiles tiles(weight);
  const auto* const words = static_cast<const uint32_t*>(weight.data);
  const auto* const scales = static_cast<const uint16_t*>(weight.scales);
  const auto wide = [](uint16_t half) { return std::bit_cast<float>(uint32_t{half} << 16); };
  for (int64_t row = first; row < last; ++row) {
    const int64_t row_of_tile = row % Tiles::kRows, first_tile = row / Tiles::kRows * (tiles.k / Tiles::kColumns);
    for (int64_t column = 0; column < weight.k; ++column) {
      const int64_t tile = first_tile + column / Tiles::kColumns, lane = row_of_tile * 4 + column % 8 / 2;
      const uint32_t word = words[(tile * Tiles::kLanes + lane) * Tiles::kWords + column % Tiles::kColumns / 32];
      const auto code = static_cast<int>(word >> (column % 32 / 8 * 4 + column % 2 * 16) & 15);
      const uint16_t* const pair = scales + (column / weight.block * tiles.n + row) * 2;
      out[row * weight.k + column] =
          static_cast<T>(std::fma(static_cast<float>(code - 8), wide(pair[0]), wide(pair[1])));
    }
  }
}

}  // namespace

Tensor decoded(const PackedWeight& weight, const Tensor& like, ScalarType dtype) {
  const std::vector<int64_t> sizes{weight.n, weight.k};
  const Tensor out = new_dense(like, sizes, dtype);
  const auto fill = [&]<typename T>(T*) {
    auto* const elements = static_cast<T*>(out.mutable_data_ptr());
    if (weight.in_tiles()) {
      torch::stable::parallel_for(0, weight.n, ceil_div(kGrain, std::max<int64_t>(1, weight.k)),
                                  [&](int64_t begin, int64_t end) { decode_tiles(weight, begin, end, elements); });
    } else if (weight.blocked()) {
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

}  // namespace fused_mlp
