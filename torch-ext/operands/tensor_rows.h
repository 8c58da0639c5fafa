#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "../ops/norms/norm.h"
#include "matrix.h"
#include "rows.h"

namespace fused_mlp {

// A tensor [..., cols] viewed as a matrix (rows.h). Holds the tensor whose memory it describes: the given one, or a
// contiguous copy if its rows are not those of a matrix.
struct TensorRows {
  torch::stable::Tensor tensor;
  int64_t rows;
  int64_t cols;
  int64_t row_stride;

  explicit TensorRows(const torch::stable::Tensor& source) : tensor(source) {
    const Rows found(source.sizes().data(), source.strides().data(), source.dim());
    rows = found.rows;
    cols = found.cols;
    row_stride = found.adjacent ? found.row_stride : cols;
    if (!found.adjacent) tensor = torch::stable::contiguous(source);
  }

  bool contiguous() const { return row_stride == cols || rows <= 1; }
};

// An operand that is only read: requesting a mutable pointer would make torch copy a copy-on-write tensor.
inline Matrix matrix(const TensorRows& rows) {
  return {const_cast<void*>(rows.tensor.const_data_ptr()), rows.row_stride};
}

// A vector, or none, as adjacent elements: a copy if it has gaps.
class DenseVector {
 public:
  explicit DenseVector(const std::optional<torch::stable::Tensor>& source) : tensor_(source) {
    if (source && source->size(0) > 1 && source->stride(0) != 1) tensor_ = torch::stable::contiguous(*source);
  }
  const void* data() const { return tensor_ ? tensor_->const_data_ptr() : nullptr; }

 private:
  std::optional<torch::stable::Tensor> tensor_;
};

inline std::optional<int64_t> rows_that_share(const torch::stable::Tensor& given, const torch::stable::Tensor& of) {
  return rows_that_share(given.sizes().data(), given.dim(), of.sizes().data(), of.dim());
}

// The weight or the bias of a norm of the rows of a tensor, or none, as adjacent elements: a copy if they are not. Its
// dtype is the tensor's, or float32.
class RowFeatures {
 public:
  RowFeatures(const std::optional<torch::stable::Tensor>& source, const torch::stable::Tensor& of) {
    if (!source) return;
    rows_.emplace(*source);
    const int64_t shared = rows_that_share(*source, of).value_or(1);
    const bool wide = source->scalar_type() != of.scalar_type();
    features_ = {matrix(*rows_).data, shared, rows_->rows > 1 ? rows_->row_stride : 0, wide};
  }
  const Features& get() const { return features_; }

 private:
  std::optional<TensorRows> rows_;
  Features features_ = kNoFeatures;
};

}  // namespace fused_mlp
