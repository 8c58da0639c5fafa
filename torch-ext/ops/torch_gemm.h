#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <utility>
#include <vector>

#include "../operands/tensor_rows.h"
#include "../torch_binding.h"

// torch's GEMMs, called without its dispatcher, which takes more time than a small product.
namespace fused_mlp {

using TorchMm = AOTITorchError(AtenTensorHandle out, AtenTensorHandle a, AtenTensorHandle b);
using TorchAddmm = AOTITorchError(AtenTensorHandle out, AtenTensorHandle bias, AtenTensorHandle a, AtenTensorHandle b,
                                  double beta, double alpha);

// Matrices and their weights [k, n], whose products are added up.
using Products = std::vector<std::pair<Tensor, Tensor>>;

// A view of the memory of `tensor` that starts at its first element, or `offset` elements after it.
template <typename Sizes>
Tensor view_of(const Tensor& tensor, const Sizes& sizes, const Sizes& strides, int64_t offset = 0) {
  AtenTensorHandle view = nullptr;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch__reinterpret_tensor(tensor.get(), sizes.size(), sizes.data(), strides.data(), offset, &view));
  return Tensor(view);
}

inline Tensor matrix_view(const Tensor& tensor, std::array<int64_t, 2> sizes, std::array<int64_t, 2> strides,
                          int64_t offset = 0) {
  return view_of(tensor, sizes, strides, offset);
}

inline Tensor matrix_view(const TensorRows& x) { return matrix_view(x.tensor, {x.rows, x.cols}, {x.row_stride, 1}); }

inline Tensor transposed(const Tensor& weight) {
  return matrix_view(weight, {weight.size(1), weight.size(0)}, {weight.stride(1), weight.stride(0)});
}

// out [rows, n] = x [rows, k] weight [n, k]^T + bias. The sum is rounded once, after the bias is added.
template <TorchMm kMm, TorchAddmm kAddmm>
void linear_into(const Tensor& out, const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  const Tensor columns = transposed(weight);
  TORCH_ERROR_CODE_CHECK(bias ? kAddmm(out.get(), bias->get(), x.get(), columns.get(), 1.0, 1.0)
                              : kMm(out.get(), x.get(), columns.get()));
}

}  // namespace fused_mlp
