#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <initializer_list>
#include <utility>
#include <vector>

#include "../operands/activation.h"
#include "../operands/matrix.h"
#include "../operands/operands.h"
#include "torch_gemm.h"

// The layout of results of elementwise operations in memory, and the order in which the pointwise kernels walk tensors.
namespace fused_mlp {

using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;
using Strides = std::vector<int64_t>;

// The strides that torch gives to the results of its elementwise operations on operands of the same shape (its
// TensorIterator); fused_mlp/backends/strides.py has the same rules for shapes without data.
class StrideRules {
 public:
  explicit StrideRules(Sizes sizes) : sizes_(sizes) {}

  Strides unary(const Strides& x) const { return result({&x}, true); }
  Strides binary(const Strides& x, const Strides& y) const { return result({&x, &y}, true); }
  Strides with_a_number(const Strides& x) const { return result({&x}, false); }

  // The strides of act(gate).
  Strides activated(Activation activation, const Strides& gate) const {
    switch (activation) {
      case Activation::kLinear:
        return gate;
      case Activation::kQuickGelu:
        return binary(gate, unary(with_a_number(gate)));  // x * sigmoid(1.702 * x)
      case Activation::kRelu2:
        return unary(unary(gate));
      default:
        return unary(gate);
    }
  }

  // The strides of act(gate) * up.
  Strides product(Activation activation, const Strides& gate, const Strides& up) const {
    return binary(activated(activation, gate), up);
  }

  // The strides of the gradients of gate and up, as autograd computes them.
  std::pair<Strides, Strides> gradients(Activation activation, const Strides& grad, const Strides& gate,
                                        const Strides& up) const {
    const Strides value = activated(activation, gate), of_value = binary(grad, up), up_grad = binary(grad, value);
    switch (activation) {
      case Activation::kLinear:
        return {of_value, up_grad};
      case Activation::kQuickGelu:
        return {binary(of_value, unary(with_a_number(gate))), up_grad};
      case Activation::kRelu:
        return {binary(value, of_value), up_grad};
      case Activation::kRelu2: {
        const Strides relu = unary(gate);
        return {binary(relu, binary(of_value, with_a_number(unary(relu)))), up_grad};
      }
      case Activation::kSigmoid:
        return {binary(of_value, value), up_grad};
      default:
        return {binary(of_value, gate), up_grad};
    }
  }

 private:
  using Operands = std::initializer_list<const Strides*>;

  int64_t dims() const { return static_cast<int64_t>(sizes_.size()); }

  // `short_cut`: the fast path of torch if no operand is a number.
  Strides result(Operands operands, bool short_cut) const {
    const auto all = [&](auto&& predicate) {
      return std::all_of(operands.begin(), operands.end(), [&](const Strides* each) { return predicate(*each); });
    };
    const Strides rows = dense(row_major());
    if (all([&](const Strides& x) { return lies_as(x, row_major()); })) return rows;
    if (short_cut) {
      if (dims() == 4 && all([&](const Strides& x) { return lies_as(x, kChannelsLast); })) return dense(kChannelsLast);
      const Strides& first = **operands.begin();
      if (lies_as(first, by_stride(first)) && all([&](const Strides& x) { return x == first; })) return first;
    }
    return dense(sorted(operands));
  }

  Strides row_major() const {
    Strides order(dims());
    for (int64_t d = 0; d < dims(); ++d) order[d] = dims() - 1 - d;
    return order;
  }

  Strides by_stride(const Strides& x) const {
    Strides order = row_major();
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return x[a] < x[b]; });
    return order;
  }

  // True if the elements are contiguous, with the first dimension of `order` fastest.
  bool lies_as(const Strides& x, const Strides& order) const {
    if (std::find(sizes_.begin(), sizes_.end(), 0) != sizes_.end()) return true;
    int64_t expected = 1;
    for (const int64_t d : order) {
      if (sizes_[d] == 1) continue;
      if (x[d] != expected) return false;
      expected *= sizes_[d];
    }
    return true;
  }

  Strides dense(const Strides& order) const {
    Strides strides(dims());
    int64_t stride = 1;
    for (const int64_t d : order) {
      strides[d] = stride;
      stride *= std::max<int64_t>(sizes_[d], 1);
    }
    return strides;
  }

  // The dimensions, fastest first. The first operand that distinguishes two dimensions decides their order. This is an
  // insertion sort, as in torch, because the comparison may leave two dimensions undecided that it distinguishes from a
  // third.
  Strides sorted(Operands operands) const {
    Strides order = row_major();
    const auto slower = [&](int64_t a, int64_t b) {
      for (const Strides* x : operands) {
        const int64_t stride_a = (*x)[a], stride_b = (*x)[b];
        if (stride_a == 0 || stride_b == 0) continue;
        if (stride_a != stride_b) return stride_a < stride_b ? -1 : 1;
        if (sizes_[a] > sizes_[b]) return 1;
      }
      return 0;
    };
    for (int64_t i = 1; i < dims(); ++i) {
      for (int64_t inner = i, outer = i - 1; outer >= 0; --outer) {
        const int decided = slower(order[outer], order[inner]);
        if (decided < 0) break;
        if (decided == 0) continue;
        std::swap(order[outer], order[inner]);
        inner = outer;
      }
    }
    return order;
  }

  Sizes sizes_;
  const Strides kChannelsLast = {1, 3, 2, 0};
};

inline Strides strides_of(const Tensor& tensor) { return {tensor.strides().begin(), tensor.strides().end()}; }

// The strides of act(gate) * up.
inline Strides product_strides(int64_t activation, const Tensor& gate, const Tensor& up) {
  if (gate.is_contiguous() && up.is_contiguous()) return dense_strides(gate.sizes());
  return StrideRules(gate.sizes()).product(static_cast<Activation>(activation), strides_of(gate), strides_of(up));
}

// The strides of its gradients for gate and up.
inline std::pair<Strides, Strides> gradient_strides(int64_t activation, const Tensor& grad, const Tensor& gate,
                                                    const Tensor& up) {
  if (grad.is_contiguous() && gate.is_contiguous() && up.is_contiguous()) {
    return {dense_strides(gate.sizes()), dense_strides(gate.sizes())};
  }
  return StrideRules(gate.sizes())
      .gradients(static_cast<Activation>(activation), strides_of(grad), strides_of(gate), strides_of(up));
}

// Tensors of the same shape as matrices whose elements correspond, in the order of a dense result, with as few rows as
// the strides permit. It holds a copy of each tensor that has another order or gaps between the elements of a row.
class Walk {
 public:
  int64_t rows = 1;
  int64_t cols = 1;

  Walk(const Strides& result, std::initializer_list<const Tensor*> inputs) {
    const Sizes sizes = (*inputs.begin())->sizes();
    Strides order;  // slowest first
    for (int64_t d = 0; d < static_cast<int64_t>(sizes.size()); ++d) {
      if (sizes[d] != 1) order.push_back(d);
      cols *= sizes[d];
    }
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return result[a] > result[b]; });
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

  static Rows rows_of(const Tensor& x, const Strides& order) {
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

  static Tensor copy(const Tensor& x, const Strides& order) {
    Strides sizes, strides;
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
