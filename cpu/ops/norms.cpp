// Single norms, forward and backward.
#include "norms.h"

#include <algorithm>

#include "../../torch-ext/ops/norms/norm_training.h"

namespace fused_mlp {
namespace {

// Rows are added up in parts of few rows, so that rounding errors stay small. The number of parts does not depend on
// the number of threads, so neither do the sums.
int64_t parts_of(int64_t rows) {
  constexpr int64_t kRows = 32, kMost = 1024;
  return std::clamp<int64_t>(ceil_div(rows, kRows), 1, kMost);
}

// The functions that norm_training.h requires of a backend.
struct Cpu {
  static void norm(const TensorRows& x, const Norm& norm, const Tensor& y, const Tensor& statistics) {
    norm_rows({dtype_of(x.tensor, "x"), x.rows, x.cols}, norm, matrix(x), kNoMatrix, {y.mutable_data_ptr(), x.cols},
              static_cast<float*>(statistics.mutable_data_ptr()));
  }

  static constexpr bool kSums = false;

  static std::pair<Tensor, Tensor> drop(const Tensor&, double) {
    STD_TORCH_CHECK(false, "dropout must be 0 in this build");
  }

  static void sum_norm(const TensorRows& x, const TensorRows& residual, const Norm& norm, const Tensor& sum,
                       const Tensor& y, const Tensor& statistics) {
    const PointwiseShape shape{dtype_of(x.tensor, "x"), x.rows, x.cols};
    const Matrix added{sum.mutable_data_ptr(), x.cols};
    norm_rows(shape, {NormKind::kNone, kNoFeatures, kNoFeatures, 0.0f, Residual::kAdded, 1.0f}, matrix(x),
              matrix(residual), added);
    Norm alone = norm;
    alone.residual = Residual::kNone;
    norm_rows(shape, alone, added, kNoMatrix, {y.mutable_data_ptr(), x.cols},
              static_cast<float*>(statistics.mutable_data_ptr()));
  }

  static void gradients(const TensorRows& x, const TensorRows& grad, const TensorRows* residual_grad, const Norm& norm,
                        const Tensor& statistics, const OptionalTensor&, double, const NormGradientsOf& wanted) {
    const auto& [dx, dweight, dbias, dropped, dropped_bias] = wanted;
    const DType dtype = dtype_of(x.tensor, "x");
    const bool centred = norm.centred();
    const int64_t stride = ceil_div(x.cols, kSumsStep) * kSumsStep, parts = parts_of(x.rows);
    std::vector<float> sums(dweight || dbias ? parts * stride * (centred ? 2 : 1) : 0);
    const auto sums_of = [&](int64_t part, bool bias) {
      return sums.empty() ? nullptr : sums.data() + ((bias ? parts : 0) + part) * stride;
    };
    const float* const scales = static_cast<const float*>(statistics.const_data_ptr());
    const Matrix residual = residual_grad == nullptr ? kNoMatrix : matrix(*residual_grad);
    const Matrix out = dx ? Matrix{dx->mutable_data_ptr(), x.cols} : kNoMatrix;
    const int64_t grain = std::max<int64_t>(kGrain * parts / std::max<int64_t>(x.rows * x.cols, 1), 1);
    torch::stable::parallel_for(0, x.cols == 0 ? 0 : parts, grain, [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; ++part) {
        const int64_t first = x.rows * part / parts, count = x.rows * (part + 1) / parts - first;
        const auto from = [&](const Matrix& rows) {
          return rows.data == nullptr ? rows : from_row(rows, first, dtype);
        };
        pointwise().norm_gradients(
            {dtype, count, x.cols}, norm,
            {from(matrix(x)), from(matrix(grad)), from(residual), from(out), scales + first, scales + x.rows + first,
             sums_of(part, false), centred ? sums_of(part, true) : nullptr});
      }
    });
    const auto add_up = [&](const OptionalTensor& found, bool bias) {
      if (!found) return;
      const bool wide = dtype_of(*found, "weight") != dtype;
      pointwise().norm_sums({dtype, parts, x.cols}, sums_of(0, bias), stride, wide, found->mutable_data_ptr());
    };
    add_up(dweight, false);
    add_up(dbias, true);
  }
};

}  // namespace

std::tuple<Tensor, Tensor> norm_forward(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                                        double eps, int64_t norm, bool rounded) {
  const BlockNorm given{weight, bias, eps, norm};
  check_norm_alone(given, x);
  return normed<Cpu>(x, given, rounded);
}

std::vector<Tensor> sum_norm_forward(const Tensor& x, const Tensor& residual, const OptionalTensor& weight,
                                     const OptionalTensor& bias, double eps, int64_t norm, double dropout) {
  return sum_normed<Cpu>(x, residual, {weight, bias, eps, norm}, dropout);
}

std::vector<Tensor> norm_backward(const Tensor& grad, const Tensor& x, const OptionalTensor& weight,
                                  const Tensor& statistics, const OptionalTensor& residual_grad,
                                  const OptionalTensor& kept, double dropout, int64_t norm, int64_t needs) {
  return norm_gradients<Cpu>(grad, x, weight, statistics, residual_grad, kept, dropout, norm, needs);
}

}  // namespace fused_mlp
