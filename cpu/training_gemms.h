// The products of training on a CPU, as forward and backward of layers ask for them.
#pragma once

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "../torch-ext/operands/tensor_rows.h"
#include "../torch-ext/ops/adapted.h"
#include "../torch-ext/ops/backward.h"
#include "layers.h"

namespace fused_mlp {

// The functions that backward.h and adapted.h ask of a backend.
struct Cpu {
  static constexpr bool kHasSums = false;
  static constexpr bool kAddsRankLast = true;
  static constexpr bool kDrops = false;

  struct Guard {
    explicit Guard(const Tensor&) {}
  };

  static void linear_into(const Tensor& out, const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
    run_rows(x, {weight, bias, nullptr, nullptr, static_cast<int64_t>(Activation::kLinear)}, nullptr, out);
  }

  static void mm(const Tensor& out, const Tensor& a, const Tensor& b) { multiply(out, a, b, false); }
  static void add_mm(const Tensor& out, const Tensor& a, const Tensor& b) { multiply(out, a, b, true); }

  static bool batches(const Tensor&, int64_t, int64_t) { return false; }
  static void mm_both(Tensor&, Tensor&, const Tensor&, const Tensor&, const Tensor&) {}

  static Tensor column_sums(const Tensor& x, std::optional<torch::headeronly::ScalarType> dtype) {
    constexpr int64_t kColumns = 32;  // a line of memory
    const PointwiseShape all = shape(x);
    if (dtype || all.dtype != DType::kBFloat16) {
      const int64_t rows = 0;
      return torch::stable::sum(x, torch::headeronly::IntHeaderOnlyArrayRef(&rows, 1), false, dtype);
    }
    const Tensor out = new_dense(x, {all.cols});
    const Matrix in = matrix(x), sums{out.mutable_data_ptr(), all.cols};
    const int64_t grain = ceil_div(kGrain, std::max<int64_t>(all.rows * kColumns, 1));
    torch::stable::parallel_for(0, ceil_div(all.cols, kColumns), grain, [&](int64_t begin, int64_t end) {
      const int64_t first = begin * kColumns, cols = std::min(end * kColumns, all.cols) - first;
      pointwise().column_sums({all.dtype, all.rows, cols}, from_column(in, first, all.dtype),
                              from_column(sums, first, all.dtype));
    });
    return out;
  }

  static Tensor rows(const Tensor& x) {
    const TensorRows found(x);
    return gemm_rows(matrix_view(found.tensor, {found.rows, found.cols}, {found.row_stride, 1}));
  }

  static void apply(const Tensor& gate, const OptionalTensor& up, const Tensor& out, int64_t activation) {
    if (up) {
      run_pointwise(pointwise().act_and_mul, shape(gate), activation, matrix(gate), matrix(*up), matrix(out));
    } else {
      run_pointwise(pointwise().act, shape(gate), activation, matrix(gate), matrix(out));
    }
  }

  static void differentiate(const Tensor& grad, const Tensor& gate, const OptionalTensor& up, const Tensor& dgate,
                            const OptionalTensor& dup, const OptionalTensor& values, int64_t activation) {
    const Matrix of_values = values ? matrix(*values) : kNoMatrix;
    if (up) {
      run_pointwise(pointwise().act_and_mul_backward, shape(gate), activation, matrix(grad), matrix(gate), matrix(*up),
                    matrix(dgate), matrix(*dup), of_values);
    } else {
      run_pointwise(pointwise().act_backward, shape(gate), activation, matrix(grad), matrix(gate), matrix(dgate),
                    of_values);
    }
  }

  static void scaled_mm(const Tensor& out, const Tensor& a, const Tensor& b, double scale) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_addmm_out(out.get(), out.get(), a.get(), b.get(), 0.0, scale));
  }

  static int64_t rank_rows(const Tensor&, const Tensor&, const RankFactors&, int64_t) { return 0; }

  template <typename... Operands>
  static NoKernel layer(const Operands&...) {
    return {};
  }
  template <typename... Operands>
  static NoKernel kept_values(const Operands&...) {
    return {};
  }
  template <typename... Operands>
  static NoKernel hidden_gradients(const Operands&...) {
    return {};
  }
  template <typename... Operands>
  static NoKernel input_gradient(const Operands&...) {
    return {};
  }

 private:
  static PointwiseShape shape(const Tensor& rows) { return {dtype_of(rows, "x"), rows.size(0), rows.size(1)}; }
  static Matrix matrix(const Tensor& rows) { return {const_cast<void*>(rows.const_data_ptr()), rows.stride(0)}; }
};

}  // namespace fused_mlp
