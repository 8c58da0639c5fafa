#pragma once

#include <cstdint>
#include <optional>

namespace fused_mlp {

// The memory of a tensor [..., cols] as that of a matrix: `rows` rows of `cols` elements, `row_stride` elements apart.
// If `adjacent` is false, it is not such a matrix, and there is no row_stride: a chunk of a packed projection is one, a
// transpose is not.
struct Rows {
  int64_t rows = 1, cols = 1, row_stride;
  bool adjacent;

  Rows(const int64_t* sizes, const int64_t* strides, int64_t dims) {
    if (dims != 0) cols = sizes[dims - 1];
    for (int64_t d = 0; d + 1 < dims; ++d) rows *= sizes[d];
    row_stride = cols;
    adjacent = dims == 0 || cols <= 1 || strides[dims - 1] == 1;
    int64_t next_stride = -1;  // the stride with which the next outer dimension continues the rows of the inner ones
    for (int64_t d = dims - 2; adjacent && d >= 0; --d) {
      if (sizes[d] == 1) continue;
      if (next_stride < 0) {
        row_stride = strides[d];
      } else {
        adjacent = strides[d] == next_stride;
      }
      next_stride = strides[d] * sizes[d];
    }
  }
};

// `sizes` are those of a tensor that is broadcast to one of sizes `of`, [..., features]. Returns the number of
// consecutive rows of the latter that share a row of the former. For [batch, 1, features] and [batch, tokens, features]
// that is `tokens`. Returns nothing if the shapes do not match, or if non-consecutive rows would share one.
inline std::optional<int64_t> rows_that_share(const int64_t* sizes, int64_t dims, const int64_t* of, int64_t of_dims) {
  if (dims == 0 || dims > of_dims || sizes[dims - 1] != of[of_dims - 1]) return std::nullopt;
  int64_t rows = 1;
  bool varies = false;
  for (int64_t d = 2; d <= of_dims; ++d) {  // starting at the last dimension
    const int64_t size = d <= dims ? sizes[dims - d] : 1, wanted = of[of_dims - d];
    if (size == 1 && !varies) {
      rows *= wanted;
    } else if (size != wanted) {
      return std::nullopt;
    }
    varies = varies || size != 1;
  }
  return rows;
}

}  // namespace fused_mlp
