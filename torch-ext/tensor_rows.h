#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "matrix.h"

namespace fused_mlp {

// A tensor [..., cols] seen as a matrix: `rows` rows of `cols` adjacent elements, `row_stride` elements apart.
// Holds the tensor whose memory it describes: the one given, or a contiguous copy where its strides admit no such view
// (a chunk of a packed projection does; a transpose does not).
struct TensorRows {
  torch::stable::Tensor tensor;
  int64_t rows;
  int64_t cols;
  int64_t row_stride;

  explicit TensorRows(const torch::stable::Tensor& source) : tensor(source) {
    const auto sizes = source.sizes();
    const auto strides = source.strides();
    const int64_t dims = source.dim();
    cols = dims == 0 ? 1 : sizes[dims - 1];
    rows = 1;
    for (int64_t d = 0; d + 1 < dims; ++d) rows *= sizes[d];
    row_stride = cols;
    bool viewable = dims == 0 || cols <= 1 || strides[dims - 1] == 1;
    int64_t next_stride = -1;  // what the next outer dimension must step by to continue the rows of the inner ones
    for (int64_t d = dims - 2; viewable && d >= 0; --d) {
      if (sizes[d] == 1) continue;
      if (next_stride < 0) {
        row_stride = strides[d];
      } else {
        viewable = strides[d] == next_stride;
      }
      next_stride = strides[d] * sizes[d];
    }
    if (!viewable) {
      tensor = torch::stable::contiguous(source);
      row_stride = cols;
    }
  }

  bool contiguous() const { return row_stride == cols || rows <= 1; }
};

// An operand that is only read: asking for a mutable pointer would make torch copy a copy-on-write tensor.
inline Matrix matrix(const TensorRows& rows) {
  return {const_cast<void*>(rows.tensor.const_data_ptr()), rows.row_stride};
}

// A vector, or none, as adjacent elements: a copy where it has gaps.
class DenseVector {
 public:
  explicit DenseVector(const std::optional<torch::stable::Tensor>& source) : tensor_(source) {
    if (source && source->size(0) > 1 && source->stride(0) != 1) tensor_ = torch::stable::contiguous(*source);
  }
  const void* data() const { return tensor_ ? tensor_->const_data_ptr() : nullptr; }

 private:
  std::optional<torch::stable::Tensor> tensor_;
};

}  // namespace fused_mlp
