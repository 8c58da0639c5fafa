// The operands of a layer as torch needs them, when there are no tensors: tensors that do not own their memory.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <initializer_list>

#include "../torch-ext/calls/direct/plain.h"
#include "dense/layer.h"

namespace fused_mlp {

// Creates tensors for the operands and results of an MLP.
class TensorViews {
 public:
  explicit TensorViews(const PlainMlp& mlp)
      : rows_(mlp.rows), dtype_(scalar_type(mlp.dtype)), device_(torch::headeronly::DeviceType::CUDA, mlp.device) {}

  Tensor rows(const Matrix& matrix, int64_t cols) const {
    return view(matrix.data, {rows_, cols}, {matrix.row_stride, 1});
  }
  Tensor weight(const Matrix& matrix, const PlainLayer& layer, int64_t in) const {
    if (layer.transposed) return view(matrix.data, {layer.out, in}, {1, matrix.row_stride});
    return view(matrix.data, {layer.out, in}, {matrix.row_stride, 1});
  }
  OptionalTensor bias(const void* data, const PlainLayer& layer) const {
    return data == nullptr ? kNoBias : view(const_cast<void*>(data), {layer.out}, {1});
  }

 private:
  using ScalarType = torch::headeronly::ScalarType;

  static ScalarType scalar_type(DType dtype) {
    if (dtype == DType::kFloat32) return ScalarType::Float;
    return dtype == DType::kFloat16 ? ScalarType::Half : ScalarType::BFloat16;
  }

  Tensor view(void* data, std::initializer_list<int64_t> sizes, std::initializer_list<int64_t> strides) const {
    return torch::stable::from_blob(data, sizes, strides, device_, dtype_);
  }

  int64_t rows_;
  ScalarType dtype_;
  torch::stable::Device device_;
};

// The weights and biases of a layer. Holds the tensors that get() refers to.
class LayerViews {
 public:
  LayerViews(const TensorViews& views, const PlainLayer& layer, int64_t in)
      : weight_(views.weight(layer.weight, layer, in)),
        bias_(views.bias(layer.bias, layer)),
        up_bias_(views.bias(layer.up_bias, layer)),
        activation_(layer.activation) {
    if (layer.up_weight.data != nullptr) up_weight_ = views.weight(layer.up_weight, layer, in);
  }

  Layer get() const { return {weight_, up_weight_ ? &*up_weight_ : nullptr, bias_, up_bias_, activation_}; }

 private:
  Tensor weight_;
  OptionalTensor up_weight_, bias_, up_bias_;
  int64_t activation_;
};

}  // namespace fused_mlp
