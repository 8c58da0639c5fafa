#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "../operands/matrix.h"
#include "../operands/operands.h"
#include "../operands/packed.h"
#include "../torch_binding.h"

// Quantised weights as their libraries store them: the operands of the ops, and their checks.
namespace fused_mlp {

// A weight [n, k] in one of these formats.
//
// FP8, int8 and int4: data is e4m3; int8; or bytes in which element i of a row, whose k is even, is the low half of
// byte i / 2 if i is even, and otherwise the high half. Scales are float32, one for each block of block_rows x block
// elements, row by row; those of int8 are divided by nested_block, which for FP8 says if products of rounded x may sum
// with fewer bits (kFastSums). The last bits of an int4 scale are not part of it,
// but are the zero point of the block, 0 to 16, which is subtracted from the elements' bits.
//
// Int4 in tiles: data is int32 [n / 8][nested_block / 128][32][4], with n rounded up; nested_block is k with the
// columns that pad it. This is operand b of mma.m16n8k16 in the registers of each lane. Half bytes 0 to 3 of word j of
// lane t are columns 32 j + 2 (t % 4) + {0, 8, 16, 24} of row t / 4, and 4 to 7 the columns after these. An element
// with code c is (c - 8) * scale + zero, from bfloat16 pairs scales[nested_block / block][n][2].
//
// 4 bits: element i, counted through the rows, is the high half of byte i / 2 if i is even, and otherwise the low half.
// It is decoded as (code[c] * scale) rounded to a dtype, and belongs to block i / block; block_rows is 1. A block's
// scale is its element of `scales`, or, if these are nested 8-bit codes:
// nested_code[scales[b]] * nested_scales[b / nested_block] + offset.
struct QuantizedWeight {
  Tensor data, scales;
  OptionalTensor code, nested_scales, nested_code;
  PackedWeight packed;  // the same without tensors

  static constexpr int kOperands = 5, kSizes = 5;

  // The weight at position `i` in lists of all operands, of all sizes and of all offsets.
  QuantizedWeight(const std::vector<OptionalTensor>& operands, const std::vector<int64_t>& sizes, double offset,
                  size_t i)
      : data(required(operands, i, 0, "data")),
        scales(required(operands, i, 1, "scales")),
        code(operands[i * kOperands + 2]),
        nested_scales(operands[i * kOperands + 3]),
        nested_code(operands[i * kOperands + 4]),
        packed{coding(),
               data.get_device_index(),
               data.const_data_ptr(),
               scales.const_data_ptr(),
               floats(code),
               floats(nested_scales),
               floats(nested_code),
               sizes[i * kSizes],
               sizes[i * kSizes + 1],
               sizes[i * kSizes + 2],
               sizes[i * kSizes + 3],
               sizes[i * kSizes + 4],
               offset} {
    check();
  }

 private:
  using ScalarType = torch::headeronly::ScalarType;

  static const Tensor& required(const std::vector<OptionalTensor>& operands, size_t i, int which, const char* name) {
    const OptionalTensor& operand = operands[i * kOperands + which];
    STD_TORCH_CHECK(operand.has_value(), "a quantised weight must have ", name);
    return *operand;
  }

  static const float* floats(const OptionalTensor& tensor) {
    return tensor ? static_cast<const float*>(tensor->const_data_ptr()) : nullptr;
  }

  Coding coding() const {
    if (data.scalar_type() == ScalarType::Char) return Coding::kInt8;
    if (data.scalar_type() == ScalarType::Int) return Coding::kInt4Tiles;
    if (data.scalar_type() != ScalarType::Byte) return Coding::kFp8;
    return code ? Coding::kFourBits : Coding::kInt4;
  }

  void check() const {
    const PackedWeight& w = packed;
    STD_TORCH_CHECK(w.n >= 0 && w.k >= 0 && w.block_rows > 0 && w.block > 0,
                    "layout must be [out, in, block_rows, block, nested_block] with positive blocks");
    if (w.in_tiles()) {
      STD_TORCH_CHECK(w.block_rows == 1 && w.k % 8 == 0 && w.block % 32 == 0 && w.nested_block >= w.k &&
                          w.nested_block % w.block == 0 && w.nested_block % Tiles::kColumns == 0,
                      "a tiled int4 weight must have in a multiple of 8 and groups a multiple of 32");
      const auto is_at = [](const void* data, uintptr_t bytes) {
        return reinterpret_cast<uintptr_t>(data) % bytes == 0;
      };
      STD_TORCH_CHECK(is_at(w.data, 16) && is_at(w.scales, 4), "a tiled int4 weight must be aligned to 16 bytes");
      const Tiles tiles(w);
      check_operand(data, "data", ScalarType::Int, tiles.words());
      check_operand(scales, "scales", ScalarType::BFloat16, w.nested_block / w.block * tiles.n * 2);
      STD_TORCH_CHECK(!code && !nested_scales && !nested_code,
                      "a weight in this format must have only data and scales");
      return;
    }
    if (w.blocked()) {
      const bool int4 = w.coding == Coding::kInt4, int8 = w.coding == Coding::kInt8;
      check_operand(data, "data", int4 || int8 ? data.scalar_type() : ScalarType::Float8_e4m3fn, w.bytes());
      check_operand(scales, "scales", ScalarType::Float, w.blocks());
      STD_TORCH_CHECK(!code && !nested_scales && !nested_code,
                      "a weight in this format must have only data and scales");
      STD_TORCH_CHECK(!int4 || w.k % 2 == 0, "an int4 weight must have an even number of columns, not ", w.k);
      STD_TORCH_CHECK(!int8 || w.nested_block > 0, "int8 scales must have a positive divisor");
      return;
    }
    check_operand(data, "data", ScalarType::Byte, w.bytes());
    check_operand(scales, "scales", nested_scales ? ScalarType::Byte : ScalarType::Float, w.blocks());
    check_operand(*code, "code", ScalarType::Float, 16);
    STD_TORCH_CHECK(nested_scales.has_value() == nested_code.has_value(),
                    "a quantised weight must have both nested_scales and nested_code, or neither");
    if (!nested_scales) return;
    STD_TORCH_CHECK(w.nested_block > 0, "nested_block must be positive if scales are nested");
    check_operand(*nested_scales, "nested_scales", ScalarType::Float, ceil_div(w.blocks(), w.nested_block));
    check_operand(*nested_code, "nested_code", ScalarType::Float, 256);
  }

  void check_operand(const Tensor& operand, const char* name, ScalarType dtype, int64_t elements) const {
    STD_TORCH_CHECK(operand.scalar_type() == dtype, name, " of a quantised weight has the wrong dtype for its format");
    STD_TORCH_CHECK(operand.numel() == elements && operand.is_contiguous(), name, " of a quantised weight must be ",
                    elements, " contiguous elements, not ", operand.numel());
    STD_TORCH_CHECK(operand.device() == data.device(), name,
                    " of a quantised weight must be on the device of its data");
  }
};

struct QuantizedLayer {
  QuantizedWeight weight;
  OptionalTensor bias;  // adjacent elements
};

// The layers of a call, from the lists that the ops receive: the first, or gate and up if `gated`, and the second of an
// MLP if there is one.
struct QuantizedLayers {
  std::vector<QuantizedLayer> all;
  bool gated;

  QuantizedLayers(const Tensor& x, const std::vector<OptionalTensor>& weights, const std::vector<int64_t>& layouts,
                  const std::vector<double>& offsets, const std::vector<OptionalTensor>& biases, int64_t activation,
                  bool gated)
      : gated(gated) {
    check_activation(activation);
    const size_t least = gated ? 2 : 1, count = offsets.size();
    STD_TORCH_CHECK(count == least || count == least + 1, "offsets must have one element per layer");
    STD_TORCH_CHECK(weights.size() == count * QuantizedWeight::kOperands &&
                        layouts.size() == count * QuantizedWeight::kSizes && biases.size() == count,
                    "weights, layouts and biases must have 5, 5 and 1 elements for each of ", count, " layers");
    STD_TORCH_CHECK(x.dim() > 0, "x must be [..., in]");
    for (size_t i = 0; i < count; ++i) {
      all.push_back({{weights, layouts, offsets[i], i}, biases[i]});
      const PackedWeight& weight = all[i].weight.packed;
      STD_TORCH_CHECK(all[i].weight.data.device() == x.device(), "a quantised weight must be on the device of x");
      const int64_t in = i < least ? x.size(-1) : all[0].weight.packed.n;
      STD_TORCH_CHECK(weight.k == in, "a quantised weight must be [out, in] with in = ", in, ", not ", weight.k);
      if (!biases[i]) continue;
      check_same_kind(*biases[i], "bias", x);
      STD_TORCH_CHECK(biases[i]->dim() == 1 && biases[i]->size(0) == weight.n, "bias must be [out] to fit its weight");
      if (weight.n > 1 && biases[i]->stride(0) != 1) all[i].bias = torch::stable::contiguous(*biases[i]);
    }
    STD_TORCH_CHECK(!gated || all[0].weight.packed.n == all[1].weight.packed.n,
                    "gate and up must have the same number of features");
  }

  const QuantizedLayer& first() const { return all[0]; }
  const QuantizedLayer* up() const { return gated ? &all[1] : nullptr; }
  const QuantizedLayer* second() const { return all.size() > (gated ? 2 : 1) ? &all.back() : nullptr; }
};

// Implemented by a backend: a weight as a tensor [n, k] on the device of `like`, and the layers of a call.
Tensor decoded(const PackedWeight& weight, const Tensor& like, torch::headeronly::ScalarType dtype);
Tensor run_quantized(const Tensor& x, const QuantizedLayers& layers, int64_t activation);

}  // namespace fused_mlp
