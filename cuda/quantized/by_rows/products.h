// Layers of FP8 weights with a scale per row, by torch's product of scaled rows.
#pragma once

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>

#include "../../../torch-ext/ops/quantized.h"
#include "../../../torch-ext/ops/torch_gemm.h"
#include "../../dense/layer.h"
#include "../../device.h"
#include "rounding.h"

namespace fused_mlp {

// act(x), times up if it has data, in e4m3, and the scales of its rows.
class RowsInE4m3 {
 public:
  RowsInE4m3(const Tensor& like, const Matrix& x, const Matrix& up, int64_t rows, int64_t columns, int64_t activation)
      : data_(new_dense(like, {rows, columns}, ScalarType::Float8_e4m3fn)),
        scales_(new_dense(like, {rows, 1}, ScalarType::Float)) {
    check(launch_row_rounding({x, up, rows, columns, activation, static_cast<uint8_t*>(data_.mutable_data_ptr()),
                               static_cast<float*>(scales_.mutable_data_ptr())},
                              current_stream(like)));
  }

  // out [rows, n] = these rows weight^T + bias, in bfloat16.
  void multiply(const QuantizedLayer& layer, const Tensor& out) const {
    const PackedWeight& weight = layer.weight.packed;
    const Tensor columns = matrix_view(layer.weight.data, {weight.k, weight.n}, {1, weight.k});
    const Tensor of_columns = matrix_view(layer.weight.scales, {1, weight.n}, {weight.n, 1});
    AtenTensorHandle bias = layer.bias ? layer.bias->get() : nullptr;
    int32_t dtype = aoti_torch_dtype_bfloat16();
    TORCH_ERROR_CODE_CHECK(aoti_torch_cuda__scaled_mm_out(out.get(), data_.get(), columns.get(), scales_.get(),
                                                          of_columns.get(), bias == nullptr ? nullptr : &bias, nullptr,
                                                          &dtype, adds_fast(weight, bias != nullptr)));
  }

 private:
  using ScalarType = torch::headeronly::ScalarType;

  // Beyond these depths cuBLAS has no such product with a bias for some shapes, and its sums stop growing at 16384
  // times the size of their terms.
  static bool adds_fast(const PackedWeight& weight, bool has_bias) {
    return weight.adds_fast() && weight.k <= (has_bias ? 4096 : 16384);
  }

  const Tensor data_, scales_;
};

}  // namespace fused_mlp
