#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "../../operands/operands.h"
#include "../../operands/tensor_rows.h"
#include "../../torch_binding.h"
#include "norm.h"

// The block around an MLP, by a backend's layers and norms.
namespace fused_mlp {

inline Tensor dense(const Tensor& source) {
  if (source.is_contiguous()) return source;
  const Tensor copy = new_dense(source, source.sizes());
  TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(copy.get(), source.get(), 0));
  return copy;
}

inline bool is_same(const Tensor& a, const Tensor& b) {
  const auto strides = a.strides(), others = b.strides();
  return a.const_data_ptr() == b.const_data_ptr() && std::equal(strides.begin(), strides.end(), others.begin());
}

// Backend::norm(x, residual, norm, out): for rows; out may be x; residual is kNoMatrix if `norm` has none.
template <typename Backend>
void norm_rows(const Tensor& x, const Tensor* residual, const BlockNorm& given, Residual place, double factor,
               const Tensor& out) {
  const TensorRows rows(x), others(residual == nullptr ? x : *residual);
  const RowFeatures weight(given.weight, x), bias(given.bias, x);
  const Norm norm{static_cast<NormKind>(given.kind), weight.get(), bias.get(),
                  static_cast<float>(given.eps),     place,        static_cast<float>(factor)};
  Backend::norm(rows, residual == nullptr ? kNoMatrix : matrix(others), norm, out);
}

// layers(x): the MLP.
template <typename Backend, typename Layers>
Tensor block(const Tensor& x, const Around& around, const Layers& layers) {
  Tensor values = x, residual = around.residual;
  if (around.first.kind != 0) {
    const Tensor rows = dense(x);
    if (is_same(x, residual)) residual = rows;  // a copy serves both
    values = new_dense(x, x.sizes());
    norm_rows<Backend>(rows, nullptr, around.first, Residual::kNone, 1.0, values);
  }
  values = layers(values);
  const Residual place = around.norms_sum ? Residual::kNormed : Residual::kAdded;
  norm_rows<Backend>(values, &residual, around.last, place, around.factor, values);
  return values;
}

}  // namespace fused_mlp
