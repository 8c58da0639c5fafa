#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "operands.h"
#include "torch_binding.h"

// The block that an MLP is part of, by a backend's layers and its norms.
namespace fused_mlp {

// What is around an MLP in its block: torch_binding.h says what `norm` means.
struct Around {
  const Tensor& residual;
  const OptionalTensor &weight, &bias;  // of the norm
  std::optional<double> eps;            // none where there is no norm
  int64_t norm;

  bool norm_first() const { return is_norm_first(norm); }
  bool centred() const { return norm / 2 == 0; }                       // LayerNorm's
  float weight_offset() const { return norm / 2 == 2 ? 1.0f : 0.0f; }  // of the weight that is stored
};

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

// Backend:
//   norm(x, residual, around, out)  the norm of x + residual, or of x where residual is null; out may be x
//   sum(a, b)                       of tensors whose rows are adjacent
// layers(x): the MLP.
template <typename Backend, typename Layers>
Tensor block(const Tensor& x, const Around& around, const Layers& layers) {
  Tensor values = x, added = around.residual;
  if (around.norm_first()) {
    const Tensor rows = dense(x);
    if (is_same(x, added)) added = rows;  // a copy serves both
    values = new_dense(x, x.sizes());
    Backend::norm(rows, nullptr, around, values);
  }
  values = layers(values);
  if (around.eps && !around.norm_first()) {
    Backend::norm(values, &added, around, values);
    return values;
  }
  return Backend::sum(values, dense(added));
}

}  // namespace fused_mlp
