#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <vector>

#include "../operands/matrix.h"
#include "../operands/operands.h"
#include "torch_gemm.h"

namespace fused_mlp {

// Tensors of the same shape as matrices whose elements correspond, for the pointwise kernels, with as few rows as the
// strides permit. It holds a copy of each tensor that is not row-major or has gaps between the elements of a row.
class Walk {
 public:
  int64_t rows = 1;
  int64_t cols = 1;

  explicit Walk(std::initializer_list<const Tensor*> inputs) {
    const auto sizes = (*inputs.begin())->sizes();
    std::vector<int64_t> order;  // slowest first
    for (int64_t d = 0; d < static_cast<int64_t>(sizes.size()); ++d) {
      if (sizes[d] != 1) order.push_back(d);
      cols *= sizes[d];
    }
    const int64_t numel = cols;
    std::vector<Rows> found;
    for (const Tensor* input : inputs) {
      found.push_back(rows_of(*input, order));
      if (rows == 1 && found.back().cols > 1 && found.back().cols < numel) {
        cols = found.back().cols;
        rows = numel / cols;
      }
    }
    for (const Tensor* input : inputs) {  // const pointers: a mutable one makes torch copy a copy-on-write tensor
      const Rows& view = found[matrices_.size()];
      if (view.cols == numel || numel == 0) {
        matrices_.push_back({const_cast<void*>(input->const_data_ptr()), cols});
      } else if (view.cols == cols) {
        matrices_.push_back({const_cast<void*>(input->const_data_ptr()), view.stride});
      } else {
        copies_.push_back(copy(*input, order));
        matrices_.push_back({const_cast<void*>(copies_.back().const_data_ptr()), cols});
      }
    }
  }

  Matrix input(size_t index) const { return matrices_[index]; }
  Matrix output(const Tensor& dense) const { return {dense.mutable_data_ptr(), cols}; }

 private:
  struct Rows {
    int64_t cols;    // the columns of adjacent elements; 0 if the rows are not evenly spaced
    int64_t stride;  // from row to row
  };

  static Rows rows_of(const Tensor& x, const std::vector<int64_t>& order) {
    const auto sizes = x.sizes(), strides = x.strides();
    int64_t cols = 1;
    auto d = order.rbegin();
    for (; d != order.rend() && strides[*d] == cols; ++d) cols *= sizes[*d];
    if (d == order.rend()) return {cols, cols};
    const int64_t stride = strides[*d];
    for (int64_t expected = stride; d != order.rend(); expected *= sizes[*d], ++d) {
      if (strides[*d] != expected) return {0, 0};
    }
    return {cols > 1 ? cols : 0, stride};
  }

  static Tensor copy(const Tensor& x, const std::vector<int64_t>& order) {
    std::vector<int64_t> sizes, strides;
    for (const int64_t d : order) {
      sizes.push_back(x.size(d));
      strides.push_back(x.stride(d));
    }
    return torch::stable::contiguous(view_of(x, sizes, strides));
  }

  std::vector<Matrix> matrices_;
  std::vector<Tensor> copies_;
};

}  // namespace fused_mlp
