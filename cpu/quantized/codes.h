#pragma once

#include <cstdint>

// Quantised weights as kernels read them. torch-ext/ops/quantized.h defines the meaning of their bits.
namespace fused_mlp::quantized {

// The positions of elements: two in a byte, the first in its high or its low half, or one in a byte.
enum class Format { kHighFirst, kLowFirst, kInt8, kFp8 };

// Rows of `k` elements, a multiple of 32, in blocks that have a scale each: an element's scale has the index (row >>
// rows_shift) * blocks_of_row + (column >> columns_shift). A block has 32 columns times a power of two, or all columns.
struct Codes {
  Format format;
  const uint8_t* data;
  int64_t k;
  const float* values;  // the values of the 4-bit codes
  int rows_shift, columns_shift;
  int64_t blocks_of_row;

  // float32, or nested 8-bit codes. In float32 scales of 4-bit integers the last bits are the zero point and not part
  // of the scale; float32 scales of int8 are multiplied by `factor`.
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
  // The columns of a block, or of the part of it that is aligned to `most` columns.
  int64_t columns(int64_t most) const {
    return columns_shift < 62 && int64_t{1} << columns_shift < most ? int64_t{1} << columns_shift : most;
  }
};

}  // namespace fused_mlp::quantized
