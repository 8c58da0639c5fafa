#pragma once

#include <torch/csrc/stable/ops.h>

#include <array>
#include <tuple>
#include <utility>
#include <vector>

#include "../../operands/operands.h"
#include "../../torch_binding.h"
#include "../torch_gemm.h"
#include "rotary.h"

// Rotary embeddings of tensors, by a backend's kernel.
namespace fused_mlp {

// Backend::rotary(rotary, q)
template <typename Backend>
std::tuple<Tensor, Tensor> rotated(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin,
                                   bool inverse) {
  STD_TORCH_CHECK(q.dim() == 4, "q must be [batch, heads, tokens, features]");
  const int64_t batch = q.size(0), tokens = q.size(2), features = q.size(3);
  check_same_kind(k, "k", q);
  STD_TORCH_CHECK(k.dim() == 4 && k.size(0) == batch && k.size(2) == tokens && k.size(3) == features,
                  "k must be [batch, heads, tokens, features] and match q except in heads");
  STD_TORCH_CHECK(features % 2 == 0, "q must have an even number of features");
  for (const auto& [angles, name] : {std::pair(&cos, "cos"), std::pair(&sin, "sin")}) {
    check_same_kind(*angles, name, q);
    STD_TORCH_CHECK(angles->dim() == 3 && (angles->size(0) == batch || angles->size(0) == 1) &&
                        angles->size(1) == tokens && angles->size(2) == features,
                    name, " must be [batch or 1, tokens, features]");
  }
  const auto in_rows = [](const Tensor& x) { return x.stride(-1) == 1 ? x : torch::stable::contiguous(x); };
  // The result has the layout of torch's sum: the dimensions in the order of x's strides.
  const auto like = [](const Tensor& x) {
    const int64_t b = x.size(0), h = x.size(1), t = x.size(2), f = x.size(3);
    if (x.stride(1) >= x.stride(2)) return new_dense(x, x.sizes());
    const Tensor tokens_first = new_dense(x, std::vector<int64_t>{b, t, h, f});
    return view_of(tokens_first, std::array{b, h, t, f}, std::array{t * h * f, f, h * f, int64_t{1}});
  };
  const auto angles_of = [](const Tensor& angles) {
    return Angles{angles.const_data_ptr(), angles.size(0) == 1 ? 0 : angles.stride(0), angles.stride(1)};
  };
  const Tensor q_in = in_rows(q), k_in = in_rows(k), cos_in = in_rows(cos), sin_in = in_rows(sin);
  const Tensor q_out = like(q_in), k_out = like(k_in);
  const auto heads_of = [](const Tensor& in, const Tensor& out) {
    return Heads{in.const_data_ptr(),
                 out.mutable_data_ptr(),
                 in.size(1),
                 {in.stride(0), in.stride(1), in.stride(2)},
                 {out.stride(0), out.stride(1), out.stride(2)}};
  };
  const Rotary rotary{{heads_of(q_in, q_out), heads_of(k_in, k_out)},
                      angles_of(cos_in),
                      angles_of(sin_in),
                      batch,
                      tokens,
                      features / 2,
                      Backend::dtype(q),
                      inverse};
  if (batch * tokens * features > 0) Backend::rotary(rotary, q);
  return {q_out, k_out};
}

}  // namespace fused_mlp
