#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <utility>
#include <vector>

#include "activation.h"
#include "operands.h"
#include "tensor_rows.h"
#include "torch_binding.h"
#include "torch_gemm.h"

// The gradients of an MLP, or of its first layer alone, by torch's GEMMs and a backend's pointwise kernels, or by its
// GEMMs that have epilogues of training.
namespace fused_mlp {

// The operands of training_forward. Bit i of `needs` asks for the gradient of operand i.
enum Operand { kX, kWeight, kUpWeight, kSecondWeight, kBias, kUpBias, kSecondBias, kOperands };

// The first layer by its gate and up. An `up_first` says that weight and bias hold both, and in which order.
struct FirstLayer {
  Tensor weight;
  OptionalTensor up_weight, bias, up_bias;

  FirstLayer(const Tensor& weight, const OptionalTensor& up_weight, const OptionalTensor& bias,
             const OptionalTensor& up_bias, std::optional<bool> up_first)
      : weight(weight), up_weight(up_weight), bias(bias), up_bias(up_bias) {
    if (!up_first) return;
    STD_TORCH_CHECK(weight.dim() == 2 && weight.size(0) % 2 == 0, "weight must be [2 * hidden, in]");
    STD_TORCH_CHECK(!up_weight && !up_bias, "up_weight and up_bias must be left out where weight holds both");
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

// A tensor of the shape of a layer's result.
inline void check_kept(const Tensor& tensor, const char* name, const Tensor& x, const Tensor& weight) {
  check_same_kind(tensor, name, x);
  const auto sizes = tensor.sizes(), in = x.sizes();
  STD_TORCH_CHECK(sizes.size() == in.size() && std::equal(sizes.begin(), sizes.end() - 1, in.begin()) &&
                      tensor.size(-1) == weight.size(0),
                  name, " must have the shape of its layer's result");
}

// Gate and up, which lie beside each other in the rows of a dense tensor, as matrices.
inline std::pair<Tensor, Tensor> halves_of(const Tensor& both, int64_t rows, bool up_first) {
  const int64_t features = both.size(-1) / 2;
  const auto half = [&](bool second) {
    return matrix_view(both, {rows, features}, {2 * features, 1}, second ? features : 0);
  };
  return {half(up_first), half(!up_first)};
}

// As many rows at once as make what is made again, three matrices [rows, hidden], no larger than x, in blocks of about
// one size; or all of them where that saves less than it takes: sums in float32 of three gradients of weights, and what
// is added to one of them.
inline int64_t rows_of_a_block(int64_t rows, int64_t in, int64_t hidden) {
  // With fewer rows to a block, the sums would take more than a thirtieth of the time.
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

// What a backend answers that has no kernel for a product with its epilogue.
struct NoKernel {
  explicit operator bool() const { return false; }
  template <typename... Outputs>
  void launch(const Outputs&...) const {}
};

// Backend:
//   linear_into(out, x, weight, bias)  out = x weight^T + bias, of matrices
//   mm(out, a, b)                out = a b
//   add_mm(out, a, b)            out += a b
//   kHasSums                     whether its mm writes the product of float16 or bfloat16 to float32 too, and there is
//                                add(sum, term), sum += term, of float32 tensors that lie alike and without gaps
//   batches(weight)              whether two products that make gradients of such weights take less time as one batch
//   mm_both(out, up_out, a, up_a, x)  that batch, out = a^T x and up_out = up_a^T x; it may exchange the two outputs
//   column_sums(x, dtype)        the sums [cols] of the columns of a matrix, of x's dtype or the given one
//   rows(x)                      x [..., cols] as a matrix whose rows have adjacent elements, if it can, without a copy
//   apply(gate, up, out, activation)                       out = act(gate) * up, or without up, act(gate)
//   differentiate(grad, gate, up, dgate, dup, values, activation)  the gradients of gate and up, and unless values is
//                                                          null, apply; outputs may be inputs
//   kept_values(x, first, activation)                      a kernel, or none, whose launch(gate, up, values) is
//                                                          linear_into for gate and for up, and apply
//   hidden_gradients(grad, weight, gate, up, activation)   a kernel, or none, whose launch(dgate, dup, values) is mm,
//                                                          differentiate and, unless values is null, apply
//   input_gradient(dgate, weight, dup, up_weight)          a kernel, or none, whose launch(dx) is mm and add_mm
template <typename Backend>
class Backward {
 public:
  Backward(const Tensor& grad, const Tensor& x, std::optional<bool> up_first, int64_t activation, int64_t needs)
      : grad_(Backend::rows(grad)),
        input_(x),
        x_(Backend::rows(x)),
        up_first_(up_first),
        activation_(activation),
        needs_(needs) {}

  // Makes again what a forward has not kept, all at once or block by block of rows. In blocks, gradients of weights and
  // biases are summed in float32 and rounded once.
  std::vector<Tensor> run_again(const Tensor& weight, const OptionalTensor& up_weight,
                                const OptionalTensor& second_weight, const OptionalTensor& bias,
                                const OptionalTensor& up_bias) {
    const int64_t rows = x_.size(0), hidden = weight.size(0) / (up_first_ ? 2 : 1);
    const int64_t block = Backend::kHasSums ? rows_of_a_block(rows, x_.size(1), hidden) : rows;
    if (block == rows) {
      make_again(weight, up_weight, second_weight, bias, up_bias);
      return results();
    }
    if (needs(kX)) make_input_gradient(needs(up_weight ? kUpWeight : kWeight));
    OptionalTensor sums[kOperands];
    for (int64_t start = 0; start < rows; start += block) {
      const int64_t count = std::min(block, rows - start);
      Backward part(rows_of(grad_, start, count), rows_of(x_, start, count), up_first_, activation_, needs_);
      if (dx_rows_) part.dx_rows_ = rows_of(*dx_rows_, start, count);
      part.sums_ = sums;
      part.make_again(weight, up_weight, second_weight, bias, up_bias);
    }
    for (int operand = 0; operand < kOperands; ++operand) {
      if (sums[operand]) found_[operand] = rounded(*sums[operand]);
    }
    return results();
  }

  // `gate` and `up` are the values before the activation, both in `gate` where the weight holds both: then so are their
  // gradients, and each product below is one for the two. `in_place`: they are written to, and their memory is freed as
  // soon as it is not needed. Peak memory beside operands and gradients: three matrices [rows, hidden] with gate and
  // up among them, five where they are to stay.
  std::vector<Tensor> run(const Tensor& weight, const OptionalTensor& up_weight, const OptionalTensor& second_weight,
                          Tensor gate, OptionalTensor up, bool in_place) {
    differentiate(weight, up_weight, second_weight, gate, up, in_place, needs(kSecondWeight));
    return results();
  }

 private:
  void make_again(const Tensor& weight, const OptionalTensor& up_weight, const OptionalTensor& second_weight,
                  const OptionalTensor& bias, const OptionalTensor& up_bias) {
    auto kept = [&] {
      const FirstLayer first(weight, up_weight, bias, up_bias, up_first_);
      using Kernel = decltype(Backend::kept_values(x_, first, activation_));
      return needs(kSecondWeight) ? Backend::kept_values(x_, first, activation_) : Kernel();
    }();
    const auto made = [&](const Tensor& weight, const OptionalTensor& bias) {
      const Tensor values = new_dense(input_, {x_.size(0), weight.size(0)});
      if (!kept) Backend::linear_into(values, x_, weight, bias);
      return values;
    };
    Tensor gate = made(weight, bias);
    OptionalTensor up = up_weight ? OptionalTensor(made(*up_weight, up_bias)) : std::nullopt;
    if (kept) {
      const auto [gate_rows, up_rows] = parts(gate, up);
      const Tensor values = new_dense(input_, {x_.size(0), gate_rows.size(1)});
      kept.launch(gate_rows, up_rows, values);
      add_found(kSecondWeight, of_weight(grad_, values, *second_weight));
    }
    differentiate(weight, up_weight, second_weight, gate, up, true, needs(kSecondWeight) && !kept);
  }

  // `makes_values`: the hidden values, for the gradient of the second weight.
  void differentiate(const Tensor& weight, const OptionalTensor& up_weight, const OptionalTensor& second_weight,
                     Tensor gate, OptionalTensor up, bool in_place, bool makes_values) {
    const auto [gate_rows, up_rows] = parts(flat(gate), up ? OptionalTensor(flat(*up)) : std::nullopt);
    const std::array<int64_t, 2> sizes{x_.size(0), gate_rows.size(1)};
    auto fused = [&] {
      using Kernel = decltype(Backend::hidden_gradients(grad_, weight, gate_rows, up_rows, activation_));
      if (!second_weight || !needs_first()) return Kernel();
      return Backend::hidden_gradients(grad_, *second_weight, gate_rows, up_rows, activation_);
    }();
    OptionalTensor dhidden;
    if (second_weight) {
      if (makes_values && !needs_first()) {
        const Tensor values = in_place && !up_first_ ? gate_rows : new_dense(gate, sizes);
        Backend::apply(gate_rows, up_rows, values, activation_);
        if (in_place && (up || up_first_)) release(up ? *up : gate);
        add_found(kSecondWeight, of_weight(grad_, values, *second_weight));
      }
      if (needs(kSecondBias)) add_found(kSecondBias, of_bias(grad_));
      if (!needs_first()) return;
      if (!fused) {
        dhidden = new_dense(gate, sizes);
        Backend::mm(*dhidden, grad_, *second_weight);
      }
    }
    OptionalTensor dgate = flat(gate), dup = up ? up_rows : std::nullopt;
    const bool in_dhidden = dhidden && !in_place && !up_first_;
    if (!in_place) {
      dgate = in_dhidden ? dhidden : OptionalTensor(new_dense(gate, {x_.size(0), weight.size(0)}));
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
      if (values) add_found(kSecondWeight, of_weight(grad_, *values, *second_weight));
    }
    dhidden.reset();

    if (needs(kX) && !dx_rows_) make_input_gradient(needs(up ? kUpWeight : kWeight));
    auto both = [&] {
      using Kernel = decltype(Backend::input_gradient(*dgate, weight, *dup, *up_weight));
      if (!dx_rows_ || !up || dx_rows_->stride(1) != 1) return Kernel();
      return Backend::input_gradient(*dgate, weight, *dup, *up_weight);
    }();
    if (both) both.launch(*dx_rows_);
    if (dx_rows_ && !both) add_to_input(*dgate, weight, &Backend::mm);
    const bool batched = needs(kWeight) && needs(kUpWeight) && batches(weight, *up_weight);
    if (batched) {
      Tensor first = new_dense(weight, weight.sizes()), second = new_dense(weight, weight.sizes());
      Backend::mm_both(first, second, *dgate, *dup, x_);
      found_[kWeight] = first;
      found_[kUpWeight] = second;
    }
    if (needs(kWeight) && !batched) add_found(kWeight, of_weight(*dgate, x_, weight));
    if (needs(kBias)) add_found(kBias, of_bias(*dgate));
    dgate.reset();
    if (in_place && needs(kUpWeight) && !batched) release(gate);
    if (up) {
      if (dx_rows_ && !both) add_to_input(*dup, *up_weight, &Backend::add_mm);
      if (needs(kUpWeight) && !batched) add_found(kUpWeight, of_weight(*dup, x_, *up_weight));
      if (needs(kUpBias)) add_found(kUpBias, of_bias(*dup));
    }
  }

  // Gate and up, of matrices of each or of one that holds both.
  std::pair<Tensor, OptionalTensor> parts(const Tensor& gate, const OptionalTensor& up) const {
    if (!up_first_) return {gate, up};
    return halves_of(gate, gate.size(0), *up_first_);
  }

  bool needs(Operand operand) const { return needs_ >> operand & 1; }
  bool needs_first() const { return needs(kX) || needs(kWeight) || needs(kUpWeight) || needs(kBias) || needs(kUpBias); }

  // A dense tensor [..., cols] as a matrix.
  Tensor flat(const Tensor& dense) const {
    const int64_t cols = dense.size(-1);
    return matrix_view(dense, {x_.size(0), cols}, {cols, 1});
  }

  // Makes room for the gradient of x in the layout that autograd gives it: column by column for an x that, as a matrix,
  // lies so without gaps, else row by row. F.linear makes a matrix of more dimensions if their strides say that it can,
  // those of size 1 included, and always where the weight needs a gradient.
  void make_input_gradient(bool is_always_matrix) {
    const auto sizes = input_.sizes(), strides = input_.strides();
    const size_t dims = sizes.size();
    const int64_t rows = x_.size(0);
    std::vector<int64_t> by_column = dense_strides({sizes.data(), dims - 1});
    by_column.push_back(rows);
    bool is_by_column = dims == 2 || (dims > 2 && rows > 1);
    for (size_t d = 0; is_by_column && d < dims; ++d) {
      const bool is_free = dims > 2 && d + 1 < dims && sizes[d] == 1 && is_always_matrix;
      is_by_column = is_free || strides[d] == by_column[d];
    }
    const Tensor dx = is_by_column ? new_strided(input_, sizes, by_column) : new_dense(input_, sizes);
    dx_rows_ = dx.stride(-1) == 1 ? flat(dx) : matrix_view(dx, {rows, x_.size(1)}, {1, rows});
    found_[kX] = dx;
  }

  // Runs mm or add_mm for dx (+)= grad weight. torch's GEMMs take an output whose rows have adjacent elements.
  template <typename Gemm>
  void add_to_input(const Tensor& grad, const Tensor& weight, Gemm gemm) const {
    if (dx_rows_->stride(1) != 1) {
      gemm(transposed(*dx_rows_), transposed(weight), transposed(grad));
    } else {
      gemm(*dx_rows_, grad, weight);
    }
  }

  static bool has_gaps(const Tensor& weight) { return weight.stride(1) != 1 || weight.stride(0) != weight.size(1); }

  // Whether the gradients of gate's and up's weights are made as one batch. It needs the gradients of gate and up at
  // the same time, beside those of all weights, which must not be more memory than eager's six matrices [rows, hidden]
  // beside the gradient of one weight.
  bool batches(const Tensor& weight, const Tensor& up_weight) const {
    const int64_t out = weight.size(0), in = weight.size(1);
    return sums_ == nullptr && x_.size(0) * (4 * out - in) >= 2 * out * in && !has_gaps(weight) &&
           !has_gaps(up_weight) && Backend::batches(weight);
  }

  // grad^T x in the layout that autograd gives it: row by row for a weight without gaps, else transposed.
  Tensor of_weight(const Tensor& grad, const Tensor& x, const Tensor& weight) const {
    const int64_t out = weight.size(0), in = weight.size(1);
    if (has_gaps(weight)) {
      const Tensor result = new_dense(weight, {in, out}, sums_dtype());
      Backend::mm(result, transposed(x), grad);
      return transposed(result);
    }
    const Tensor result = new_dense(weight, {out, in}, sums_dtype());
    Backend::mm(result, transposed(grad), x);
    return result;
  }

  Tensor of_bias(const Tensor& grad) const { return Backend::column_sums(grad, sums_dtype()); }

  // A gradient that is a term of a sum is float32. Others have the dtype of their operand, for which nothing is said.
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
    Tensor result = new_strided(input_, sum.sizes(), {strides.begin(), strides.end()});
    return torch::stable::copy_(result, sum);
  }

  // Frees the memory of a tensor that others still refer to, and do not read: autograd, until the op returns.
  static void release(const Tensor& tensor) {
    std::array<StableIValue, 2> stack{torch::stable::detail::from(tensor), torch::stable::detail::from(int64_t{0})};
    TORCH_ERROR_CODE_CHECK(
        torch_call_dispatcher("inductor::resize_storage_bytes_", "", stack.data(), TORCH_ABI_VERSION));
  }

  // Those asked for, in the order of the operands.
  std::vector<Tensor> results() const {
    std::vector<Tensor> wanted;
    for (int operand = 0; operand < kOperands; ++operand) {
      if (needs(static_cast<Operand>(operand))) wanted.push_back(found_[operand].value());
    }
    return wanted;
  }

  const Tensor grad_, input_, x_;
  const std::optional<bool> up_first_;
  const int64_t activation_, needs_;
  OptionalTensor found_[kOperands];
  OptionalTensor dx_rows_;          // the gradient of x as a matrix
  OptionalTensor* sums_ = nullptr;  // in float32, of a block of rows: what is found is added to them
};

// `gate` is what a forward has kept, or null; `up` as well.
template <typename Backend>
std::vector<Tensor> gradients(const Tensor& grad, const Tensor& x, const Tensor& weight,
                              const OptionalTensor& up_weight, const OptionalTensor& second_weight,
                              const OptionalTensor& bias, const OptionalTensor& up_bias, const OptionalTensor& gate,
                              const OptionalTensor& up, int64_t activation, int64_t needs, std::optional<bool> up_first,
                              bool in_place) {
  const FirstLayer first(weight, up_weight, bias, up_bias, up_first);
  check_training(x, first, second_weight, std::nullopt, activation);
  check_kept(grad, "grad", x, second_weight ? *second_weight : first.weight);
  Backward<Backend> backward(grad, x, up_first, activation, needs);
  if (!gate) return backward.run_again(weight, up_weight, second_weight, bias, up_bias);
  STD_TORCH_CHECK(up.has_value() == up_weight.has_value(), "up must be there where up_weight is");
  const auto dense = [&](const Tensor& kept, const char* name) {
    check_kept(kept, name, x, weight);
    STD_TORCH_CHECK(!in_place || kept.is_contiguous(), name, " must be contiguous to be overwritten");
    return kept.is_contiguous() ? kept : torch::stable::contiguous(kept);
  };
  return backward.run(weight, up_weight, second_weight, dense(*gate, "gate"),
                      up ? OptionalTensor(dense(*up, "up")) : std::nullopt, in_place);
}

}  // namespace fused_mlp
