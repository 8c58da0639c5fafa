#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <utility>
#include <vector>

#include "../operands/activation.h"
#include "../operands/operands.h"
#include "../operands/tensor_rows.h"
#include "../torch_binding.h"
#include "torch_gemm.h"

// The gradients of an MLP, or only of its first layer, by torch's GEMMs and a backend's pointwise kernels, or by the
// backend's GEMMs with training epilogues.
namespace fused_mlp {

// The operands of training_forward. Bit i of `needs` requests the gradient of operand i. Bit kOperands + i says that
// the gradient of x or of a weight of the first layer is column-major; the operand itself need not exist for that.
enum Operand { kX, kWeight, kUpWeight, kSecondWeight, kBias, kUpBias, kSecondBias, kOperands };

class Needs {
 public:
  explicit Needs(int64_t bits) : bits_(bits) {}
  bool operator()(Operand operand) const { return bits_ >> operand & 1; }
  bool by_column(Operand operand) const { return bits_ >> (kOperands + operand) & 1; }
  bool gate() const { return (*this)(kX) || (*this)(kWeight) || (*this)(kBias); }
  bool up() const { return (*this)(kUpWeight) || (*this)(kUpBias); }
  bool up_alone() const { return up() && !gate() && !(*this)(kSecondWeight); }
  bool first() const { return gate() || up(); }

 private:
  int64_t bits_;
};

// The first layer with its gate and up. If `up_first` is set, weight and bias hold both, and it gives their order.
struct FirstLayer {
  Tensor weight;
  OptionalTensor up_weight, bias, up_bias;

  FirstLayer(const Tensor& weight, const OptionalTensor& up_weight, const OptionalTensor& bias,
             const OptionalTensor& up_bias, std::optional<bool> up_first)
      : weight(weight), up_weight(up_weight), bias(bias), up_bias(up_bias) {
    if (!up_first) return;
    STD_TORCH_CHECK(weight.dim() == 2 && weight.size(0) % 2 == 0, "weight must be [2 * hidden, in]");
    STD_TORCH_CHECK(!up_weight && !up_bias, "up_weight and up_bias must not be given if weight holds both");
    STD_TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == weight.size(0)), "bias must be [2 * hidden]");
    const int64_t features = weight.size(0) / 2;
    const auto half = [&](bool second) {
      return matrix_view(weight, {features, weight.size(1)}, {weight.stride(0), weight.stride(1)},
                         second ? features * weight.stride(0) : 0);
    };
    this->weight = half(*up_first);
    this->up_weight = half(!*up_first);
    if (!bias) return;
    const auto half_bias = [&](bool second) {
      return view_of(*bias, std::array{features}, std::array{bias->stride(0)}, second ? features * bias->stride(0) : 0);
    };
    this->bias = half_bias(*up_first);
    this->up_bias = half_bias(!*up_first);
  }
};

inline void check_training(const Tensor& x, const FirstLayer& first, const OptionalTensor& second_weight,
                           const OptionalTensor& second_bias, int64_t activation) {
  check_activation(activation);
  check_linear(x, first.weight, first.bias);
  if (first.up_weight) check_gated_linear(x, first.weight, *first.up_weight, first.bias, first.up_bias);
  if (second_weight) check_second(x, first.weight, *second_weight, second_bias);
}

// A tensor with this number of features, or any number, for each row of another.
inline void check_rows(const Tensor& tensor, const char* name, const Tensor& like, std::optional<int64_t> features) {
  check_same_kind(tensor, name, like);
  const auto sizes = tensor.sizes(), expected = like.sizes();
  STD_TORCH_CHECK(!sizes.empty() && sizes.size() == expected.size() &&
                      std::equal(sizes.begin(), sizes.end() - 1, expected.begin()) &&
                      tensor.size(-1) == features.value_or(tensor.size(-1)),
                  name, " must have the shape of its layer's result");
}

// The operands of a backward with kept values before the activation; of the others, only those that a gradient needs.
inline void check_backward(const Tensor& grad, const OptionalTensor& x, const OptionalTensor& weight,
                           const OptionalTensor& up_weight, const OptionalTensor& second_weight, const Tensor& gate,
                           const OptionalTensor& up, Needs needs, std::optional<bool> up_first) {
  const int64_t features = gate.size(-1), hidden = up_first ? features / 2 : features;
  check_rows(grad, "grad", gate, second_weight ? second_weight->size(0) : hidden);
  check_rows(gate, "gate", grad, up_first ? 2 * hidden : hidden);
  if (up) check_rows(*up, "up", grad, hidden);
  if (x) check_rows(*x, "x", grad, std::nullopt);
  STD_TORCH_CHECK(x || !(needs(kWeight) || needs(kUpWeight)), "x is required for the gradient of a weight");
  STD_TORCH_CHECK(!(up && up_first), "up must not be given if weight holds both");
  STD_TORCH_CHECK(up || up_first || needs.up_alone() || !(up_weight || needs.up()),
                  "up is required for gradients other than its own");
  if (second_weight) check_weight(*second_weight, "second_weight", hidden, grad);
  STD_TORCH_CHECK(second_weight || !(needs(kSecondWeight) || needs(kSecondBias)),
                  "second_weight is required for its gradient or that of its bias");
  if (!needs(kX)) return;
  STD_TORCH_CHECK(weight && (!up || up_weight), "weight and up_weight are required for the gradient of x");
  const int64_t in = x ? x->size(-1) : weight->dim() == 2 ? weight->size(1) : 0;
  const auto check = [&](const Tensor& weight, const char* name, int64_t out) {
    check_weight(weight, name, in, grad);
    STD_TORCH_CHECK(weight.size(0) == out, name, " must be [hidden, in]");
  };
  check(*weight, "weight", features);
  if (up) check(*up_weight, "up_weight", hidden);
}

// Gate and up, side by side in the rows of a dense tensor, as matrices.
inline std::pair<Tensor, Tensor> halves_of(const Tensor& both, int64_t rows, bool up_first) {
  const int64_t features = both.size(-1) / 2;
  const auto half = [&](bool second) {
    return matrix_view(both, {rows, features}, {2 * features, 1}, second ? features : 0);
  };
  return {half(up_first), half(!up_first)};
}

// The number of rows per block, such that the recomputed values, three matrices [rows, hidden], are no larger than x,
// and blocks have about the same size; or all rows, if blocks save less memory than they take: float32 sums of three
// gradients of weights, and the terms added to one of them.
inline int64_t rows_of_a_block(int64_t rows, int64_t in, int64_t hidden) {
  // With fewer rows per block, the sums would take more than a thirtieth of the time.
  constexpr int64_t kLeast = 12288;
  constexpr int64_t kStep = 256;
  const auto parts = [](int64_t of, int64_t size) { return (of + size - 1) / size; };
  const int64_t most = std::max(kLeast, rows * in / std::max<int64_t>(3 * hidden, 1));
  if (rows <= most) return rows;
  const int64_t block = parts(parts(rows, parts(rows, most)), kStep) * kStep;
  return 3 * 2 * (rows - block) > 4 * 4 * in ? block : rows;
}

inline Tensor rows_of(const Tensor& matrix, int64_t start, int64_t rows) {
  return matrix_view(matrix, {rows, matrix.size(1)}, {matrix.stride(0), matrix.stride(1)}, start * matrix.stride(0));
}

// Returned by a backend that has no kernel for a product with its epilogue.
struct NoKernel {
  explicit operator bool() const { return false; }
  int64_t ctas() const { return 0; }
  template <typename... Outputs>
  void launch(const Outputs&...) const {}
};

// Backend:
//   linear_into(out, x, weight, bias)  out = x weight^T + bias, of matrices
//   mm(out, a, b)                out = a b
//   add_mm(out, a, b)            out += a b
//   kHasSums                     whether its mm can write products of float16 or bfloat16 to float32, and there is
//                                add(sum, term), sum += term, for float32 tensors of the same layout without gaps
//   batches(like, out, in)       whether two products that compute gradients of weights [out, in], in the dtype of
//                                `like`, take less time as one batch
//   mm_both(out, up_out, a, up_a, x)  that batch, out = a^T x and up_out = up_a^T x; it may exchange the two outputs
//   column_sums(x, dtype)        the sums [cols] of the columns of a matrix, in x's dtype or the given one
//   rows(x)                      x [..., cols] as a matrix with adjacent elements in its rows, a view if possible
//   apply(gate, up, out, activation)                       out = act(gate) * up, or without up, act(gate)
//   differentiate(grad, gate, up, dgate, dup, values, activation)  the gradients of gate and up, and unless values is
//                                                          null, apply; outputs may be inputs
//   kept_values(x, first, activation)                      a kernel, or none; launch(gate, up, values) is
//                                                          linear_into for gate and for up, and apply
//   hidden_gradients(grad, weight, gate, up, activation)   a kernel, or none; launch(dgate, dup, values) is mm,
//                                                          differentiate and, unless values is null, apply
//   input_gradient(products)     a kernel, or none; launch(dx) is mm and add_mm for one to three Products
template <typename Backend>
class Backward {
 public:
  Backward(const Tensor& grad, const OptionalTensor& x, std::optional<bool> up_first, int64_t activation, Needs needs)
      : result_grad_(grad),
        grad_(Backend::rows(grad)),
        x_(x ? OptionalTensor(Backend::rows(*x)) : std::nullopt),
        up_first_(up_first),
        activation_(activation),
        needs(needs) {}

  // Recomputes what a forward has not kept, all at once or in blocks of rows. In blocks, gradients of weights and
  // biases are summed in float32 and rounded once.
  std::vector<Tensor> run_again(const Tensor& weight, const OptionalTensor& up_weight,
                                const OptionalTensor& second_weight, const OptionalTensor& bias,
                                const OptionalTensor& up_bias) {
    const int64_t rows = grad_.size(0), hidden = weight.size(0) / (up_first_ ? 2 : 1);
    const int64_t block = Backend::kHasSums ? rows_of_a_block(rows, x_->size(1), hidden) : rows;
    if (block == rows) {
      make_again(weight, up_weight, second_weight, bias, up_bias);
      return results();
    }
    if (needs(kX)) make_input_gradient(x_->size(1));
    OptionalTensor sums[kOperands];
    for (int64_t start = 0; start < rows; start += block) {
      const int64_t count = std::min(block, rows - start);
      Backward part(rows_of(grad_, start, count), rows_of(*x_, start, count), up_first_, activation_, needs);
      if (dx_rows_) part.dx_rows_ = rows_of(*dx_rows_, start, count);
      part.sums_ = sums;
      part.make_again(weight, up_weight, second_weight, bias, up_bias);
    }
    for (int operand = 0; operand < kOperands; ++operand) {
      if (sums[operand]) found_[operand] = rounded(*sums[operand]);
    }
    return results();
  }

  // `gate` and `up` are the values before the activation, both in `gate` if the weight holds both: then so are their
  // gradients, and each product below is one for the two. `in_place`: they are overwritten, and their memory is freed
  // as soon as it is not needed. Peak memory besides operands and gradients: three matrices [rows, hidden] including
  // gate and up, five if these are preserved. For a gated layer, `up` may be missing if only its gradients are
  // required.
  std::vector<Tensor> run(const OptionalTensor& weight, const OptionalTensor& up_weight,
                          const OptionalTensor& second_weight, Tensor gate, OptionalTensor up, bool in_place) {
    if (needs.up_alone()) {
      differentiate_up(second_weight, gate, in_place);
    } else {
      differentiate(weight, up_weight, second_weight, gate, up, in_place, needs(kSecondWeight));
    }
    return results();
  }

 private:
  void make_again(const Tensor& weight, const OptionalTensor& up_weight, const OptionalTensor& second_weight,
                  const OptionalTensor& bias, const OptionalTensor& up_bias) {
    auto kept = [&] {
      const FirstLayer first(weight, up_weight, bias, up_bias, up_first_);
      using Kernel = decltype(Backend::kept_values(*x_, first, activation_));
      return needs(kSecondWeight) ? Backend::kept_values(*x_, first, activation_) : Kernel();
    }();
    const auto made = [&](const Tensor& weight, const OptionalTensor& bias) {
      const Tensor values = new_dense(grad_, {grad_.size(0), weight.size(0)});
      if (!kept) Backend::linear_into(values, *x_, weight, bias);
      return values;
    };
    Tensor gate = made(weight, bias);
    if (needs.up_alone()) return differentiate_up(second_weight, gate, true);
    OptionalTensor up = up_weight ? OptionalTensor(made(*up_weight, up_bias)) : std::nullopt;
    if (kept) {
      const auto [gate_rows, up_rows] = parts(gate, up);
      const Tensor values = new_dense(grad_, {grad_.size(0), gate_rows.size(1)});
      kept.launch(gate_rows, up_rows, values);
      add_found(kSecondWeight, of_second_weight(values, *second_weight));
    }
    differentiate(weight, up_weight, second_weight, gate, up, true, needs(kSecondWeight) && !kept);
  }

  // `makes_values`: also computes the hidden values, for the gradient of the second weight.
  void differentiate(const OptionalTensor& weight, const OptionalTensor& up_weight, const OptionalTensor& second_weight,
                     Tensor gate, OptionalTensor up, bool in_place, bool makes_values) {
    const auto [gate_rows, up_rows] = parts(flat(gate), up ? OptionalTensor(flat(*up)) : std::nullopt);
    const std::array<int64_t, 2> sizes{grad_.size(0), gate_rows.size(1)};
    auto fused = [&] {
      using Kernel = decltype(Backend::hidden_gradients(grad_, *second_weight, gate_rows, up_rows, activation_));
      if (!second_weight || !needs.first()) return Kernel();
      return Backend::hidden_gradients(grad_, *second_weight, gate_rows, up_rows, activation_);
    }();
    OptionalTensor dhidden;
    if (second_weight) {
      if (makes_values && !needs.first()) {
        const Tensor values = in_place && !up_first_ ? gate_rows : new_dense(gate, sizes);
        Backend::apply(gate_rows, up_rows, values, activation_);
        if (in_place && (up || up_first_)) release(up ? *up : gate);
        add_found(kSecondWeight, of_second_weight(values, *second_weight));
      }
      if (needs(kSecondBias)) add_found(kSecondBias, of_bias(grad_));
      if (!needs.first()) return;
      if (!fused) {
        dhidden = new_dense(gate, sizes);
        Backend::mm(*dhidden, grad_, *second_weight);
      }
    }
    OptionalTensor dgate = flat(gate), dup = up ? up_rows : std::nullopt;
    const bool in_dhidden = dhidden && !in_place && !up_first_;
    if (!in_place) {
      dgate = in_dhidden ? dhidden : OptionalTensor(new_dense(gate, {grad_.size(0), gate.size(-1)}));
      if (up) dup = new_dense(gate, sizes);
    }
    {
      const auto [dgate_rows, dup_rows] = parts(*dgate, dup);
      OptionalTensor values;
      if (makes_values) values = dhidden && !in_dhidden ? dhidden : OptionalTensor(new_dense(gate, sizes));
      if (fused) {
        fused.launch(dgate_rows, dup_rows, values);
      } else {
        const Tensor& dvalues = dhidden ? *dhidden : grad_;
        Backend::differentiate(dvalues, gate_rows, up_rows, dgate_rows, dup_rows, values, activation_);
      }
      if (values) add_found(kSecondWeight, of_second_weight(*values, *second_weight));
    }
    dhidden.reset();

    if (needs(kX) && !dx_rows_) make_input_gradient(weight->size(1));
    auto sum = [&] {
      using Kernel = decltype(Backend::input_gradient(Products()));
      if (!dx_rows_ || dx_rows_->stride(1) != 1) return Kernel();
      Products products{{*dgate, *weight}};
      if (up) products.emplace_back(*dup, *up_weight);
      return Backend::input_gradient(products);
    }();
    if (sum) sum.launch(*dx_rows_);
    if (dx_rows_ && !sum) {
      add_to_input(*dgate, *weight, &Backend::mm);
      if (up) add_to_input(*dup, *up_weight, &Backend::add_mm);
    }
    if (up && needs(kUpBias)) add_found(kUpBias, of_bias(*dup));
    if (!needs(kUpWeight)) {
      dup.reset();
      if (up && in_place) release(*up);
    }
    const bool batched = needs(kWeight) && needs(kUpWeight) && batches(dgate->size(1), x_->size(1));
    if (batched) {
      const std::array<int64_t, 2> of_weight{dgate->size(1), x_->size(1)};
      Tensor first = new_dense(gate, of_weight), second = new_dense(gate, of_weight);
      Backend::mm_both(first, second, *dgate, *dup, *x_);
      found_[kWeight] = first;
      found_[kUpWeight] = second;
    }
    if (needs(kWeight) && !batched) add_found(kWeight, of_weight(*dgate, kWeight));
    if (needs(kBias)) add_found(kBias, of_bias(*dgate));
    dgate.reset();
    if (in_place && needs(kUpWeight) && !batched) release(gate);
    if (up && needs(kUpWeight) && !batched) add_found(kUpWeight, of_weight(*dup, kUpWeight));
  }

  // The gradients of up's weight and bias, which do not need its values.
  void differentiate_up(const OptionalTensor& second_weight, const Tensor& gate, bool in_place) {
    const Tensor gate_rows = flat(gate);
    Tensor dvalues = grad_, dup = gate_rows;
    if (second_weight) {
      dvalues = dup = new_dense(gate, gate_rows.sizes());
      Backend::mm(dvalues, grad_, *second_weight);
    } else if (!in_place) {
      dup = new_dense(gate, gate_rows.sizes());
    }
    Backend::apply(gate_rows, dvalues, dup, activation_);
    if (in_place && second_weight) release(gate);
    if (needs(kSecondBias)) add_found(kSecondBias, of_bias(grad_));
    if (needs(kUpWeight)) add_found(kUpWeight, of_weight(dup, kUpWeight));
    if (needs(kUpBias)) add_found(kUpBias, of_bias(dup));
  }

  // Gate and up, from a matrix each or from one that holds both.
  std::pair<Tensor, OptionalTensor> parts(const Tensor& gate, const OptionalTensor& up) const {
    if (!up_first_) return {gate, up};
    return halves_of(gate, gate.size(0), *up_first_);
  }

  // A dense tensor [..., cols] as a matrix.
  Tensor flat(const Tensor& dense) const {
    const int64_t cols = dense.size(-1);
    return matrix_view(dense, {grad_.size(0), cols}, {cols, 1});
  }

  // Allocates the gradient of x, with this number of features.
  void make_input_gradient(int64_t in) {
    const auto of_result = result_grad_.sizes();
    std::vector<int64_t> sizes(of_result.begin(), of_result.end());
    sizes.back() = in;
    const int64_t rows = grad_.size(0);
    std::vector<int64_t> by_column = dense_strides({sizes.data(), sizes.size() - 1});
    by_column.push_back(rows);
    const Tensor dx = needs.by_column(kX) ? new_strided(grad_, sizes, by_column) : new_dense(grad_, sizes);
    dx_rows_ = dx.stride(-1) == 1 ? flat(dx) : matrix_view(dx, {rows, in}, {1, rows});
    found_[kX] = dx;
  }

  // Runs mm or add_mm for dx (+)= grad weight. torch's GEMMs need an output whose rows have adjacent elements.
  template <typename Gemm>
  void add_to_input(const Tensor& grad, const Tensor& weight, Gemm gemm) const {
    if (dx_rows_->stride(1) != 1) {
      gemm(transposed(*dx_rows_), transposed(weight), transposed(grad));
    } else {
      gemm(*dx_rows_, grad, weight);
    }
  }

  // True if the gradients of gate's and up's weights are one batch. It needs the gradients of gate and up at the same
  // time as those of all weights, which must not take more memory than eager's six matrices [rows, hidden] and the
  // gradient of one weight.
  bool batches(int64_t out, int64_t in) const {
    return sums_ == nullptr && grad_.size(0) * (4 * out - in) >= 2 * out * in && !needs.by_column(kWeight) &&
           !needs.by_column(kUpWeight) && Backend::batches(grad_, out, in);
  }

  Tensor of_weight(const Tensor& grad, Operand weight) const { return of_weight(grad, *x_, needs.by_column(weight)); }

  Tensor of_second_weight(const Tensor& values, const Tensor& weight) const {
    return of_weight(grad_, values, weight.stride(1) != 1 || weight.stride(0) != weight.size(1));
  }

  // grad^T x in the layout that autograd gives it: row-major for a weight without gaps, else column-major.
  Tensor of_weight(const Tensor& grad, const Tensor& x, bool by_column) const {
    const int64_t out = grad.size(1), in = x.size(1);
    if (by_column) {
      const Tensor result = new_dense(grad, {in, out}, sums_dtype());
      Backend::mm(result, transposed(x), grad);
      return transposed(result);
    }
    const Tensor result = new_dense(grad, {out, in}, sums_dtype());
    Backend::mm(result, transposed(grad), x);
    return result;
  }

  Tensor of_bias(const Tensor& grad) const { return Backend::column_sums(grad, sums_dtype()); }

  // A gradient that is a term of a sum is float32. Others have the dtype of their operand, which is the default.
  std::optional<torch::headeronly::ScalarType> sums_dtype() const {
    return sums_ == nullptr ? std::nullopt : std::optional(torch::headeronly::ScalarType::Float);
  }

  void add_found(Operand operand, const Tensor& gradient) {
    OptionalTensor& found = sums_ == nullptr ? found_[operand] : sums_[operand];
    if constexpr (Backend::kHasSums) {
      if (found) return Backend::add(*found, gradient);
    }
    found = gradient;
  }

  Tensor rounded(const Tensor& sum) const {
    const auto strides = sum.strides();
    Tensor result = new_strided(grad_, sum.sizes(), {strides.begin(), strides.end()});
    return torch::stable::copy_(result, sum);
  }

  // Frees the memory of a tensor to which others still refer without reading it: autograd, until the op returns.
  static void release(const Tensor& tensor) {
    std::array<StableIValue, 2> stack{torch::stable::detail::from(tensor), torch::stable::detail::from(int64_t{0})};
    TORCH_ERROR_CODE_CHECK(
        torch_call_dispatcher("inductor::resize_storage_bytes_", "", stack.data(), TORCH_ABI_VERSION));
  }

  // The required gradients, in the order of the operands.
  std::vector<Tensor> results() const {
    std::vector<Tensor> wanted;
    for (int operand = 0; operand < kOperands; ++operand) {
      if (needs(static_cast<Operand>(operand))) wanted.push_back(found_[operand].value());
    }
    return wanted;
  }

  const Tensor result_grad_, grad_;  // the given tensor, and its matrix
  const OptionalTensor x_;
  const std::optional<bool> up_first_;
  const int64_t activation_;
  const Needs needs;
  OptionalTensor found_[kOperands];
  OptionalTensor dx_rows_;          // the gradient of x as a matrix
  OptionalTensor* sums_ = nullptr;  // in float32; the results of a block of rows are added to them
};

// `gate` and `up` are values that a forward has kept, or null. Without `gate` all operands must exist.
template <typename Backend>
std::vector<Tensor> gradients(const Tensor& grad, const OptionalTensor& x, const OptionalTensor& weight,
                              const OptionalTensor& up_weight, const OptionalTensor& second_weight,
                              const OptionalTensor& bias, const OptionalTensor& up_bias, const OptionalTensor& gate,
                              const OptionalTensor& up, int64_t activation, int64_t needs, std::optional<bool> up_first,
                              bool in_place) {
  if (!gate) {
    STD_TORCH_CHECK(x && weight, "x and weight are required if gate is not given");
    const FirstLayer first(*weight, up_weight, bias, up_bias, up_first);
    check_training(*x, first, second_weight, std::nullopt, activation);
    check_rows(grad, "grad", *x, (second_weight ? *second_weight : first.weight).size(0));
    Backward<Backend> backward(grad, x, up_first, activation, Needs(needs));
    return backward.run_again(*weight, up_weight, second_weight, bias, up_bias);
  }
  check_activation(activation);
  check_backward(grad, x, weight, up_weight, second_weight, *gate, up, Needs(needs), up_first);
  const auto dense = [&](const Tensor& kept, const char* name) {
    STD_TORCH_CHECK(!in_place || kept.is_contiguous(), name, " must be contiguous to be overwritten");
    return kept.is_contiguous() ? kept : torch::stable::contiguous(kept);
  };
  Backward<Backend> backward(grad, x, up_first, activation, Needs(needs));
  return backward.run(weight, up_weight, second_weight, dense(*gate, "gate"),
                      up ? OptionalTensor(dense(*up, "up")) : std::nullopt, in_place);
}

}  // namespace fused_mlp
