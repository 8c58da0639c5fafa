#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "../operands/matrix.h"
#include "../operands/operands.h"
#include "../operands/zero_point.h"
#include "../torch_binding.h"

// Quantised weights as their libraries hold them: the operands of the ops, and their checks.
namespace fused_mlp {

// A weight [n, k] of one of these formats.
//
// FP8, int8 and int4: data is e4m3; int8; or bytes, where element i of a row, whose k is even, is the low half of byte
// i / 2 where i is even, and else the high one. Scales are float32, one for each block of block_rows x block elements,
// row by row; those of int8 are divided by nested_block. The last bits of those of int4 are no part of them, but the
// zero point of the block, 0 to 16: an element stands for its bits less that.
//
// 4 bits: element i, counted through the rows, is the high half of byte i / 2 where i is even, and else the low one. It
// is decoded as (code[c] * scale) rounded to a dtype, and belongs to block i / block; block_rows is 1. A block's scale
// is its element of `scales`, or where these are nested, of 8 bits:
// nested_code[scales[b]] * nested_scales[b / nested_block] + offset.
struct QuantizedWeight {
  Tensor data, scales;
  OptionalTensor code, nested_scales, nested_code;
  int64_t n, k, block_rows, block, nested_block;
  double offset;

  static constexpr int kOperands = 5, kSizes = 5;

  bool blocked() const { return data.scalar_type() != ScalarType::Byte || !code; }
  bool int4() const { return blocked() && data.scalar_type() == ScalarType::Byte; }
  bool int8() const { return data.scalar_type() == ScalarType::Char; }
  float factor() const { return int8() ? 1.0f / static_cast<float>(nested_block) : 1.0f; }  // of scales
  bool nested() const { return nested_scales.has_value(); }
  int64_t elements() const { return n * k; }
  int64_t blocks_of_row() const { return ceil_div(k, block); }  // where these are
  int64_t blocks() const { return blocked() ? ceil_div(n, block_rows) * blocks_of_row() : ceil_div(elements(), block); }

  // That of place `i` in lists of all operands, of all sizes and of all offsets.
  QuantizedWeight(const std::vector<OptionalTensor>& operands, const std::vector<int64_t>& sizes, double offset,
                  size_t i)
      : data(required(operands, i, 0, "data")),
        scales(required(operands, i, 1, "scales")),
        code(operands[i * kOperands + 2]),
        nested_scales(operands[i * kOperands + 3]),
        nested_code(operands[i * kOperands + 4]),
        n(sizes[i * kSizes]),
        k(sizes[i * kSizes + 1]),
        block_rows(sizes[i * kSizes + 2]),
        block(sizes[i * kSizes + 3]),
        nested_block(sizes[i * kSizes + 4]),
        offset(offset) {
    check();
  }

 private:
  using ScalarType = torch::headeronly::ScalarType;

  static const Tensor& required(const std::vector<OptionalTensor>& operands, size_t i, int which, const char* name) {
    const OptionalTensor& operand = operands[i * kOperands + which];
    STD_TORCH_CHECK(operand.has_value(), "a quantised weight must have ", name);
    return *operand;
  }

  void check() const {
    STD_TORCH_CHECK(n >= 0 && k >= 0 && block_rows > 0 && block > 0,
                    "layout must be [out, in, block_rows, block, nested_block], blocks positive");
    if (blocked()) {
      const auto dtype = int4() || int8() ? data.scalar_type() : ScalarType::Float8_e4m3fn;
      check_operand(data, "data", dtype, int4() ? elements() / 2 : elements());
      check_operand(scales, "scales", ScalarType::Float, blocks());
      STD_TORCH_CHECK(!code && !nested_scales && !nested_code, "a weight of such a format has data and scales alone");
      STD_TORCH_CHECK(!int4() || k % 2 == 0, "a weight of int4 must have an even number of columns, not ", k);
      STD_TORCH_CHECK(!int8() || nested_block > 0, "scales of int8 must have a positive divisor");
      return;
    }
    check_operand(data, "data", ScalarType::Byte, ceil_div(elements(), 2));
    check_operand(scales, "scales", nested() ? ScalarType::Byte : ScalarType::Float, blocks());
    check_operand(*code, "code", ScalarType::Float, 16);
    STD_TORCH_CHECK(nested_scales.has_value() == nested_code.has_value(),
                    "a quantised weight must have both nested_scales and nested_code, or neither");
    if (!nested()) return;
    STD_TORCH_CHECK(nested_block > 0, "nested_block must be positive where scales are nested");
    check_operand(*nested_scales, "nested_scales", ScalarType::Float, ceil_div(blocks(), nested_block));
    check_operand(*nested_code, "nested_code", ScalarType::Float, 256);
  }

  void check_operand(const Tensor& operand, const char* name, ScalarType dtype, int64_t elements) const {
    STD_TORCH_CHECK(operand.scalar_type() == dtype, name, " of a quantised weight is not of the dtype it must be");
    STD_TORCH_CHECK(operand.numel() == elements && operand.is_contiguous(), name, " of a quantised weight must be ",
                    elements, " adjacent elements, not ", operand.numel());
    STD_TORCH_CHECK(operand.device() == data.device(), name, " of a quantised weight is not on the device of its data");
  }
};

struct QuantizedLayer {
  QuantizedWeight weight;
  OptionalTensor bias;
};

// The layers of a call by the lists that the ops are given: the first, or gate and up where `gated`, and the second of
// an MLP where there is one.
struct QuantizedLayers {
  std::vector<QuantizedLayer> all;
  bool gated;

  QuantizedLayers(const Tensor& x, const std::vector<OptionalTensor>& weights, const std::vector<int64_t>& layouts,
                  const std::vector<double>& offsets, const std::vector<OptionalTensor>& biases, int64_t activation,
                  bool gated)
      : gated(gated) {
    check_activation(activation);
    const size_t least = gated ? 2 : 1, count = offsets.size();
    STD_TORCH_CHECK(count == least || count == least + 1, "offsets must have an element for each layer");
    STD_TORCH_CHECK(weights.size() == count * QuantizedWeight::kOperands &&
                        layouts.size() == count * QuantizedWeight::kSizes && biases.size() == count,
                    "weights, layouts and biases must have 5, 5 and 1 elements for each of ", count, " layers");
    STD_TORCH_CHECK(x.dim() > 0, "x must be [..., in]");
    for (size_t i = 0; i < count; ++i) {
      all.push_back({{weights, layouts, offsets[i], i}, biases[i]});
      const QuantizedWeight& weight = all[i].weight;
      STD_TORCH_CHECK(weight.data.device() == x.device(), "a quantised weight is not on the device of x");
      const int64_t in = i < least ? x.size(-1) : all[0].weight.n;
      STD_TORCH_CHECK(weight.k == in, "a quantised weight must be [out, in], in being ", in, ", not ", weight.k);
      if (!biases[i]) continue;
      check_same_kind(*biases[i], "bias", x);
      STD_TORCH_CHECK(biases[i]->dim() == 1 && biases[i]->size(0) == weight.n, "bias must be [out], as in its weight");
    }
    STD_TORCH_CHECK(!gated || all[0].weight.n == all[1].weight.n, "gate and up must have as many features");
  }

  const QuantizedLayer& first() const { return all[0]; }
  const QuantizedLayer* up() const { return gated ? &all[1] : nullptr; }
  const QuantizedLayer* second() const { return all.size() > (gated ? 2 : 1) ? &all.back() : nullptr; }
};

// By a backend: a weight as a tensor [n, k], and the layers of a call.
Tensor decoded(const QuantizedWeight& weight, torch::headeronly::ScalarType dtype);
Tensor run_quantized(const Tensor& x, const QuantizedLayers& layers, int64_t activation);

}  // namespace fused_mlp
