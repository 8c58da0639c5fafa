#pragma once

#include <cstdint>

// Quantised weights as kernels read them. torch-ext/ops/quantized.h says what their bits stand for.
namespace fused_mlp::quantized {

// The places of elements: two in a byte, the first in its high or its low half, or one in a byte.
enum class Format { kHighFirst, kLowFirst, kInt8, kFp8 };

// Rows of `k` elements, a multiple of 32, in blocks that have a scale each: that of an element is number
// (row >> rows_shift) * blocks_of_row + (column >> columns_shift). A block has 32 columns times a power of two, or all.
struct Codes {
  Format format;
  const uint8_t* data;
  int64_t k;
  const float* values;  // that the codes of four bits stand for
  int rows_shift, columns_shift;
  int64_t blocks_of_row;

  // float32, whose last bits are the zero point of integers of four bits and no part of the scale, and those of int8
  // are multiplied with `factor`; or nested, of 8 bits.
  const void* scales;
  float factor;
  const float *nested_scales, *nested_code;
  int nested_shift;
  float offset;

  bool halves() const { return format == Format::kHighFirst || format == Format::kLowFirst; }
  int64_t bytes(int64_t elements) const { return halves() ? elements / 2 : elements; }
  const uint8_t* at(int64_t row, int64_t column) const { return data + bytes(row * k + column); }
  int64_t block(int64_t row, int64_t column) const {
    return (row >> rows_shift) * blocks_of_row + (column >> columns_shift);
  }
  // The columns of a block, or of a part of it that begins where `most` do.
  int64_t columns(int64_t most) const {
    return columns_shift < 62 && int64_t{1} << columns_shift < most ? int64_t{1} << columns_shift : most;
  }
};

}  // namespace fused_mlp::quantized
