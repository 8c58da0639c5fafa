#include "layers.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "../torch-ext/operands/operands.h"
#include "../torch-ext/operands/tensor_rows.h"
#include "../torch-ext/ops/torch_gemm.h"
#include "amx/amx_matmul.h"
#include "amx/amx_mlp.h"
#include "few_rows/few_rows_mlp.h"
#include "few_rows/matmul.h"
#include "isa/isa.h"

namespace fused_mlp {
namespace {

Matrix dense_matrix(const Tensor& tensor, int64_t cols) { return {tensor.mutable_data_ptr(), cols}; }

Tensor rows_of(Tensor matrix, int64_t begin, int64_t count) {
  if (count == matrix.size(0)) return matrix;
  const int64_t stride = matrix.stride(0);
  return matrix_view(matrix, {count, matrix.size(1)}, {stride, matrix.stride(1)}, begin * stride);
}

// out (+)= a b, by torch's GEMM, or by vectors if that is slow.
void multiply_rows(const Tensor& out, const Tensor& a, const Tensor& b, bool accumulate) {
  if (vectors::takes_matmul(a, b)) return vectors::matmul(out, a, b, accumulate);
  if (accumulate) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_addmm_out(out.get(), out.get(), a.get(), b.get(), 1.0, 1.0));
  } else {
    TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_mm_out(out.get(), a.get(), b.get()));
  }
}

// out [rows, n] = x [rows, k] weight [n, k]^T + bias, as a product that is added to the copied bias in `out`. torch
// would copy the bias itself, but through its dispatcher, which takes as long as a small product.
void project_rows(const Tensor& out, const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  if (!bias) return multiply_rows(out, x, transposed(weight), false);
  const DenseVector dense(bias);
  const DType dtype = dtype_of(*bias, "bias");
  const int64_t cols = bias->size(0);
  const Matrix rows{out.mutable_data_ptr(), out.stride(0)};
  const void* const values = dense.data();
  torch::stable::parallel_for(0, out.size(0), ceil_div(kGrain, std::max<int64_t>(cols, 1)),
                              [=](int64_t begin, int64_t end) {
                                for (int64_t r = begin; r < end; ++r) {
                                  std::memcpy(from_row(rows, r, dtype).data, values, cols * element_bytes(dtype));
                                }
                              });
  multiply_rows(out, x, transposed(weight), true);
}

// True if `second` begins where `first` ends: both are halves of one tensor, as in a packed projection.
bool follows(const Tensor& first, const Tensor& second) {
  const int64_t bytes = first.size(0) * first.stride(0) * element_bytes(dtype_of(first, "weight"));
  if (first.dim() == 2 && (first.stride(1) != 1 || second.stride(1) != 1)) return false;
  return first.stride(0) == second.stride(0) && first.size(0) == second.size(0) && bytes > 0 &&
         static_cast<const char*>(first.const_data_ptr()) + bytes == second.const_data_ptr();
}

bool follows(const Tensor& first, const OptionalTensor& first_bias, const Tensor& second,
             const OptionalTensor& second_bias) {
  if (!follows(first, second)) return false;
  return first_bias && second_bias ? follows(*first_bias, *second_bias) : !first_bias && !second_bias;
}

// Both halves as one tensor.
Tensor doubled(const Tensor& first) {
  if (first.dim() == 1) return view_of(first, std::array{2 * first.size(0)}, std::array{first.stride(0)});
  return matrix_view(first, {2 * first.size(0), first.size(1)}, {first.stride(0), first.stride(1)});
}

// Computes gate and up of x as one product, in their memory order, and then act(gate) * up.
void run_packed(const Tensor& x, const HiddenLayer& hidden, bool up_first, const Tensor& both, const Tensor& out) {
  const Tensor& first = up_first ? *hidden.up_weight : hidden.weight;
  const OptionalTensor& first_bias = up_first ? *hidden.up_bias : hidden.bias;
  project_rows(both, x, doubled(first), first_bias ? OptionalTensor(doubled(*first_bias)) : std::nullopt);
  const int64_t features = hidden.features();
  const DType dtype = dtype_of(x, "x");
  char* const data = static_cast<char*>(both.mutable_data_ptr());
  char* const other = data + features * element_bytes(dtype);
  run_pointwise(pointwise().act_and_mul, {dtype, x.size(0), features}, hidden.activation,
                Matrix{up_first ? other : data, 2 * features}, Matrix{up_first ? data : other, 2 * features},
                dense_matrix(out, features));
}

// Runs both layers, or, without `output`, the hidden one, with torch's GEMMs on blocks of x [rows, in].
void run_blocks(const Tensor& x, const HiddenLayer& hidden, const OutputLayer* output, const Tensor& out,
                const Kept* kept = nullptr) {
  const DType dtype = dtype_of(x, "x");
  const int64_t rows = x.size(0), features = hidden.features();
  // A block has at least 512 rows: with fewer, a GEMM's pass over the weights costs too much. It has more only as long
  // as its hidden values stay in the caches, and their buffers are small enough for the allocator to keep them between
  // calls.
  constexpr int64_t kMinRows = 512, kHiddenBytes = 12 << 20;
  const bool up_follows = hidden.gated() && follows(hidden.weight, hidden.bias, *hidden.up_weight, *hidden.up_bias);
  const bool gate_follows = hidden.gated() && follows(*hidden.up_weight, *hidden.up_bias, hidden.weight, hidden.bias);
  const bool packed = kept ? kept->up_first.has_value() : up_follows || gate_follows;
  const int64_t row_bytes = std::max<int64_t>(features, 1) * element_bytes(dtype) *
                            (packed           ? 3
                             : hidden.gated() ? 2
                                              : 1);
  const int64_t block = std::min(rows, std::max(kMinRows, kHiddenBytes / row_bytes));
  // ReLU's values overwrite its input: the backward can use them instead.
  const bool in_place =
      kept && output && !hidden.gated() && static_cast<Activation>(hidden.activation) == Activation::kRelu;
  const OptionalTensor hidden_block =
      output && !in_place ? OptionalTensor(new_dense(x, {block, features})) : std::nullopt;
  const OptionalTensor up_block =
      hidden.gated() && !kept ? OptionalTensor(new_dense(x, {block, packed ? 2 * features : features})) : std::nullopt;
  for (int64_t begin = 0; begin < rows; begin += block) {
    const int64_t count = std::min(block, rows - begin);
    const Tensor x_rows = rows_of(x, begin, count), out_rows = rows_of(out, begin, count);
    const Tensor kept_rows = kept ? rows_of(kept->gate, begin, count) : out_rows;
    const Tensor hidden_rows = hidden_block ? rows_of(*hidden_block, 0, count) : in_place ? kept_rows : out_rows;
    const Tensor gate_rows = kept ? kept_rows : hidden_rows;
    const PointwiseShape shape{dtype, count, features};
    const Matrix gate = dense_matrix(gate_rows, features), values = dense_matrix(hidden_rows, features);
    if (packed) {
      const Tensor both = kept ? gate_rows : rows_of(*up_block, 0, count);
      run_packed(x_rows, hidden, kept ? *kept->up_first : gate_follows, both, hidden_rows);
    } else {
      project_rows(gate_rows, x_rows, hidden.weight, hidden.bias);
      if (hidden.gated()) {
        const Tensor up_rows = kept ? rows_of(kept->up, begin, count) : rows_of(*up_block, 0, count);
        project_rows(up_rows, x_rows, *hidden.up_weight, *hidden.up_bias);
        run_pointwise(pointwise().act_and_mul, shape, hidden.activation, gate, dense_matrix(up_rows, features), values);
      } else if (kept || static_cast<Activation>(hidden.activation) != Activation::kLinear) {
        run_pointwise(pointwise().act, shape, hidden.activation, gate, values);
      }
    }
    if (output) project_rows(out_rows, hidden_rows, output->weight, output->bias);
  }
}

Refusal layout_refusal(const Tensor& weight, const OptionalTensor& bias) {
  if (weight.size(1) > 1 && weight.stride(1) != 1) return Refusal::kColumnMajorWeight;
  return bias && bias->size(0) > 1 && bias->stride(0) != 1 ? Refusal::kStridedBias : Refusal::kNone;
}

// The reason why no kernel of ours can read the weights and biases in their layout.
Refusal layers_refusal(const HiddenLayer& hidden, const OutputLayer* output) {
  Refusal refusal = layout_refusal(hidden.weight, hidden.bias);
  if (refusal == Refusal::kNone && hidden.gated()) refusal = layout_refusal(*hidden.up_weight, *hidden.up_bias);
  if (refusal == Refusal::kNone && output != nullptr) refusal = layout_refusal(output->weight, output->bias);
  return refusal;
}

// Gate and up of the kept values, as matrices.
few_rows::Kept rows_of(const Kept& kept, int64_t features, DType dtype) {
  void* const gate = kept.gate.mutable_data_ptr();
  if (!kept.up_first) return {{gate, features}, {kept.up.mutable_data_ptr(), features}};
  const Matrix first{gate, 2 * features}, second = from_column(first, features, dtype);
  return *kept.up_first ? few_rows::Kept{second, first} : few_rows::Kept{first, second};
}

#if defined(__x86_64__)
amx::Projection projection(const Tensor& weight, const OptionalTensor& bias) {
  return {static_cast<const uint16_t*>(weight.const_data_ptr()), weight.stride(0),
          bias ? static_cast<const uint16_t*>(bias->const_data_ptr()) : nullptr};
}

// Computes what run_blocks() does, but on AMX tiles.
void run_tiles(const Tensor& x, const HiddenLayer& hidden, const OutputLayer* output, const Tensor& out,
               const Kept* kept = nullptr) {
  amx::Layer first{
      projection(hidden.weight, hidden.bias), {}, hidden.gated(), x.size(1), hidden.features(), hidden.activation};
  if (hidden.gated()) first.up = projection(*hidden.up_weight, *hidden.up_bias);
  amx::Layer second{};
  if (output) {
    second = {projection(output->weight, output->bias), {}, false, hidden.features(), output->features(),
              static_cast<int64_t>(Activation::kLinear)};
  }
  amx::Kept to{};
  if (kept) {
    const auto [gate, up] = rows_of(*kept, hidden.features(), DType::kBFloat16);
    to = {static_cast<uint16_t*>(gate.data), static_cast<uint16_t*>(up.data), gate.row_stride};
  }
  const TensorRows rows(x);
  amx::run(rows.tensor, rows.row_stride, rows.rows, first, output ? &second : nullptr, out, to);
}
#endif

// Layers in the form that the kernels for few rows use.
struct FewRowsLayers {
  few_rows::Layer first, second{};
  bool has_second;

  FewRowsLayers(DType dtype, const HiddenLayer& hidden, const OutputLayer* output) : has_second(output != nullptr) {
    first = {dtype,
             projection(hidden.weight, hidden.bias),
             {},
             hidden.gated(),
             hidden.weight.size(1),
             hidden.features(),
             hidden.activation};
    if (hidden.gated()) first.up = projection(*hidden.up_weight, *hidden.up_bias);
    if (!has_second) return;
    second = {dtype,
              projection(output->weight, output->bias),
              {},
              false,
              hidden.features(),
              output->features(),
              static_cast<int64_t>(Activation::kLinear)};
  }

  const few_rows::Layer* output() const { return has_second ? &second : nullptr; }

 private:
  static few_rows::Projection projection(const Tensor& weight, const OptionalTensor& bias) {
    return {weight.const_data_ptr(), weight.stride(0), bias ? bias->const_data_ptr() : nullptr};
  }
};

// Computes what run_blocks() does for few rows.
void run_few_rows(const Tensor& x, const HiddenLayer& hidden, const OutputLayer* output, const Tensor& out,
                  const Kept* kept = nullptr) {
  const DType dtype = dtype_of(x, "x");
  const FewRowsLayers layers(dtype, hidden, output);
  const TensorRows rows(x);
  few_rows::run({const_cast<void*>(rows.tensor.const_data_ptr()), rows.row_stride}, rows.rows, layers.first,
                layers.output(), out.mutable_data_ptr(),
                kept ? rows_of(*kept, hidden.features(), dtype) : few_rows::Kept{kNoMatrix, kNoMatrix});
}

}  // namespace

int64_t count_rows(const Tensor& x) {
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) rows *= x.size(d);
  return rows;
}

Tensor flatten_rows(const Tensor& x) {
  if (x.dim() == 2) return x;
  const TensorRows rows(x);
  return matrix_view(rows.tensor, {rows.rows, rows.cols}, {rows.row_stride, 1});
}

Tensor new_result(const Tensor& x, int64_t features) {
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = features;
  return new_dense(x, sizes);
}

Tensor matrix_of(const Tensor& result, int64_t rows) {
  const int64_t cols = result.size(-1);
  return matrix_view(result, {rows, cols}, {cols, 1});
}

Refusal tiles_refusal(const Tensor& x, const HiddenLayer& hidden, const OutputLayer* output) {
  if (dtype_of(x, "x") != DType::kBFloat16) return Refusal::kFloat32;
  return isa() == Isa::kAmx ? layers_refusal(hidden, output) : Refusal::kInstructionSet;
}

Tensor gemm_rows(const Tensor& flat) {
  return dtype_of(flat, "x") == DType::kBFloat16 && !flat.is_contiguous() ? torch::stable::contiguous(flat) : flat;
}

void multiply(const Tensor& out, const Tensor& a, const Tensor& b, bool accumulate) {
#if defined(__x86_64__)
  const bool tiles = dtype_of(a, "a") == DType::kBFloat16 && isa() == Isa::kAmx && amx::takes_matmul(a, b);
  if (tiles) return amx::matmul(out, a, b, accumulate);
#endif
  multiply_rows(out, a, b, accumulate);
}

void run_products(const Tensor& x, const HiddenLayer& hidden, const OutputLayer* output, const Tensor& out,
                  const Kept* kept) {
  if (x.size(0) == 0) return;
#if defined(__x86_64__)
  if (tiles_refusal(x, hidden, output) == Refusal::kNone) return run_tiles(x, hidden, output, out, kept);
#endif
  run_blocks(gemm_rows(x), hidden, output, out, kept);
}

bool takes_few_rows(const Tensor& x, int64_t rows, const HiddenLayer& hidden, const OutputLayer* output, bool keeps) {
  const DType dtype = dtype_of(x, "x");
  if (!few_rows::may_pay(dtype, rows) || layers_refusal(hidden, output) != Refusal::kNone) return false;
  const FewRowsLayers layers(dtype, hidden, output);
  return few_rows::take(rows, layers.first, layers.output(), keeps);
}

void run_rows(const Tensor& x, const HiddenLayer& hidden, const OutputLayer* output, const Tensor& out,
              const Kept* kept) {
  if (x.size(0) == 0) return;
  if (takes_few_rows(x, x.size(0), hidden, output, kept != nullptr)) return run_few_rows(x, hidden, output, out, kept);
  run_products(x, hidden, output, out, kept);
}

Tensor run_layers(const Tensor& x, const HiddenLayer& hidden, const OutputLayer* output) {
  const Tensor flat = flatten_rows(x);
  const Tensor out = new_result(x, output ? output->features() : hidden.features());
  if (out.numel() == 0) return out;
  run_rows(flat, hidden, output, matrix_of(out, flat.size(0)));
  return out;
}

}  // namespace fused_mlp
