// The CPU backend's ops. The GEMMs run on blocks of rows that are small enough to stay in cache, with the pointwise
// kernels between them; or, with AMX, on tiles of our own.
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "../torch-ext/activation.h"
#include "../torch-ext/backward.h"
#include "../torch-ext/elementwise.h"
#include "../torch-ext/operands.h"
#include "../torch-ext/plan.h"
#include "../torch-ext/tensor_rows.h"
#include "../torch-ext/torch_binding.h"
#include "../torch-ext/torch_gemm.h"
#include "amx_matmul.h"
#include "amx_mlp.h"
#include "few_rows_mlp.h"
#include "isa.h"
#include "matmul.h"
#include "parallel.h"
#include "pointwise.h"

namespace fused_mlp {

const PointwiseKernels& pointwise() {
#if defined(__x86_64__)
  switch (isa()) {
    case Isa::kAmx:
    case Isa::kAvx512:
      return avx512::kPointwise;
    case Isa::kAvx2:
      return avx2::kPointwise;
    case Isa::kScalar:
      break;
  }
#endif
  return scalar::kPointwise;
}

namespace {

Matrix dense_matrix(const Tensor& tensor, int64_t cols) { return {tensor.mutable_data_ptr(), cols}; }

// Applies kernel(shape, activation, operands...) to all the elements, in parallel.
template <typename Kernel, typename... Operands>
void run_pointwise(const Kernel& kernel, PointwiseShape shape, int64_t activation, Operands... operands) {
  for_parts(shape, [&](const PointwiseShape& part, auto... rows) { kernel(part, activation, rows...); }, operands...);
}

// The rows of [..., cols].
int64_t count_rows(const Tensor& x) {
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) rows *= x.size(d);
  return rows;
}

// [..., cols] as [rows, cols], a view wherever the strides admit one.
Tensor flatten_rows(const Tensor& x) {
  if (x.dim() == 2) return x;
  const TensorRows rows(x);
  return matrix_view(rows.tensor, {rows.rows, rows.cols}, {rows.row_stride, 1});
}

// A dense tensor of the leading dimensions of x, and such a tensor as a matrix. An op returns the tensor itself: a view
// could not be changed in place under autograd.
Tensor new_result(const Tensor& x, int64_t features) {
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = features;
  return new_dense(x, sizes);
}

Tensor matrix_of(const Tensor& result, int64_t rows) {
  const int64_t cols = result.size(-1);
  return matrix_view(result, {rows, cols}, {cols, 1});
}

Tensor rows_of(Tensor matrix, int64_t begin, int64_t count) {
  if (count == matrix.size(0)) return matrix;
  const int64_t stride = matrix.stride(0);
  return matrix_view(matrix, {count, matrix.size(1)}, {stride, matrix.stride(1)}, begin * stride);
}

// out (+)= a b, by torch's GEMM, or where that is slow, by vectors.
void multiply_rows(const Tensor& out, const Tensor& a, const Tensor& b, bool accumulate) {
  if (vectors::takes_matmul(a, b)) return vectors::matmul(out, a, b, accumulate);
  if (accumulate) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_addmm_out(out.get(), out.get(), a.get(), b.get(), 1.0, 1.0));
  } else {
    TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_mm_out(out.get(), a.get(), b.get()));
  }
}

// out [rows, n] = x [rows, k] weight [n, k]^T + bias, as a product that is added to what `out` holds. torch would copy
// the bias there itself, but through its dispatcher, which takes as long as a small product.
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

// act(x weight^T + bias), times (x up_weight^T + up_bias) for a gated one.
struct HiddenLayer {
  const Tensor& weight;
  const OptionalTensor& bias;
  const Tensor* up_weight;
  const OptionalTensor* up_bias;
  int64_t activation;

  bool gated() const { return up_weight != nullptr; }
  int64_t features() const { return weight.size(0); }
};

struct OutputLayer {
  const Tensor& weight;
  const OptionalTensor& bias;

  int64_t features() const { return weight.size(0); }
};

// Whether `second` begins where `first` ends: both are halves of one tensor, as of a packed projection.
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

// The two halves as one.
Tensor doubled(const Tensor& first) {
  if (first.dim() == 1) return view_of(first, std::array{2 * first.size(0)}, std::array{first.stride(0)});
  return matrix_view(first, {2 * first.size(0), first.size(1)}, {first.stride(0), first.stride(1)});
}

// Gate and up of x as one product, in the order in which they lie, and the product of the two.
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

// What the backward of a hidden layer needs, [rows, features]: gate before its activation, and up where there is one.
// With `up_first`, `gate` is [rows, 2 * features] and holds both.
struct Kept {
  Tensor gate, up;
  std::optional<bool> up_first;
};

// Runs both layers, or, without `output`, the hidden one, with torch's GEMMs on blocks of x [rows, in].
void run_blocks(const Tensor& x, const HiddenLayer& hidden, const OutputLayer* output, const Tensor& out,
                const Kept* kept = nullptr) {
  const DType dtype = dtype_of(x, "x");
  const int64_t rows = x.size(0), features = hidden.features();
  // A block has at least 512 rows: with fewer, a GEMM's pass over the weights costs too much. It has more only as long
  // as its hidden values stay in the caches, and their buffers stay so small that the allocator keeps them between
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
  const OptionalTensor hidden_block = output ? OptionalTensor(new_dense(x, {block, features})) : std::nullopt;
  const OptionalTensor up_block =
      hidden.gated() && !kept ? OptionalTensor(new_dense(x, {block, packed ? 2 * features : features})) : std::nullopt;
  for (int64_t begin = 0; begin < rows; begin += block) {
    const int64_t count = std::min(block, rows - begin);
    const Tensor x_rows = rows_of(x, begin, count), out_rows = rows_of(out, begin, count);
    const Tensor hidden_rows = output ? rows_of(*hidden_block, 0, count) : out_rows;
    const Tensor gate_rows = kept ? rows_of(kept->gate, begin, count) : hidden_rows;
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

// Why no kernel of ours reads the weights and biases as they lie.
Refusal layers_refusal(const HiddenLayer& hidden, const OutputLayer* output) {
  Refusal refusal = layout_refusal(hidden.weight, hidden.bias);
  if (refusal == Refusal::kNone && hidden.gated()) refusal = layout_refusal(*hidden.up_weight, *hidden.up_bias);
  if (refusal == Refusal::kNone && output != nullptr) refusal = layout_refusal(output->weight, output->bias);
  return refusal;
}

// Why the AMX kernels do not take these layers. They take both or neither: the hidden values never leave their tiles.
Refusal tiles_refusal(const Tensor& x, const HiddenLayer& hidden, const OutputLayer* output) {
  if (dtype_of(x, "x") != DType::kBFloat16) return Refusal::kFloat32;
  return isa() == Isa::kAmx ? layers_refusal(hidden, output) : Refusal::kInstructionSet;
}

// Gate and up of what is kept, as matrices.
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

// x [..., in] as a matrix that torch's GEMMs take: oneDNN's for bf16 may read past the end of a row, and between
// strided rows there may be a NaN.
Tensor gemm_rows(const Tensor& flat) {
  return dtype_of(flat, "x") == DType::kBFloat16 && !flat.is_contiguous() ? torch::stable::contiguous(flat) : flat;
}

// out (+)= a b
void multiply(const Tensor& out, const Tensor& a, const Tensor& b, bool accumulate) {
#if defined(__x86_64__)
  const bool tiles = dtype_of(a, "a") == DType::kBFloat16 && isa() == Isa::kAmx && amx::takes_matmul(a, b);
  if (tiles) return amx::matmul(out, a, b, accumulate);
#endif
  multiply_rows(out, a, b, accumulate);
}

// Runs both layers, or, without `output`, the hidden one, for x [rows, in].
void run_products(const Tensor& x, const HiddenLayer& hidden, const OutputLayer* output, const Tensor& out,
                  const Kept* kept = nullptr) {
#if defined(__x86_64__)
  if (tiles_refusal(x, hidden, output) == Refusal::kNone) return run_tiles(x, hidden, output, out, kept);
#endif
  run_blocks(gemm_rows(x), hidden, output, out, kept);
}

// Layers as the kernels of few rows see them.
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

// Whether the kernels of few rows take these layers.
bool takes_few_rows(const Tensor& x, int64_t rows, const HiddenLayer& hidden, const OutputLayer* output) {
  const DType dtype = dtype_of(x, "x");
  if (!few_rows::may_pay(dtype, rows) || layers_refusal(hidden, output) != Refusal::kNone) return false;
  const FewRowsLayers layers(dtype, hidden, output);
  return few_rows::take(rows, layers.first, layers.output());
}

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

// What backward.h asks of a backend.
struct Cpu {
  static constexpr bool kHasSums = false;

  static void linear_into(const Tensor& out, const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
    run_products(x, {weight, bias, nullptr, nullptr, static_cast<int64_t>(Activation::kLinear)}, nullptr, out);
  }

  static void mm(const Tensor& out, const Tensor& a, const Tensor& b) { multiply(out, a, b, false); }
  static void add_mm(const Tensor& out, const Tensor& a, const Tensor& b) { multiply(out, a, b, true); }

  static bool batches(const Tensor&) { return false; }
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

// Runs both layers, or, without `output`, the hidden one, for x [rows, in], by the kernels of few rows where they pay.
void run_rows(const Tensor& x, const HiddenLayer& hidden, const OutputLayer* output, const Tensor& out,
              const Kept* kept = nullptr) {
  if (takes_few_rows(x, x.size(0), hidden, output)) return run_few_rows(x, hidden, output, out, kept);
  run_products(x, hidden, output, out, kept);
}

// Runs both layers for x [..., in], or, without `output`, the hidden one.
Tensor run(const Tensor& x, const HiddenLayer& hidden, const OutputLayer* output) {
  const Tensor flat = flatten_rows(x);
  const Tensor out = new_result(x, output ? output->features() : hidden.features());
  if (out.numel() == 0) return out;
  run_rows(flat, hidden, output, matrix_of(out, flat.size(0)));
  return out;
}

}  // namespace

Tensor act_and_mul(const Tensor& gate, const Tensor& up, int64_t activation) {
  check_activation(activation);
  check_same_shape(up, "up", gate);
  const DType dtype = dtype_of(gate, "gate");
  const Strides strides = product_strides(activation, gate, up);
  const Tensor out = new_strided(gate, gate.sizes(), strides);
  const Walk walk(strides, {&gate, &up});
  run_pointwise(pointwise().act_and_mul, {dtype, walk.rows, walk.cols}, activation, walk.input(0), walk.input(1),
                walk.output(out));
  return out;
}

std::tuple<Tensor, Tensor> act_and_mul_backward(const Tensor& grad, const Tensor& gate, const Tensor& up,
                                                int64_t activation) {
  check_activation(activation);
  check_same_shape(gate, "gate", grad);
  check_same_shape(up, "up", grad);
  const DType dtype = dtype_of(gate, "gate");
  const auto [strides, up_strides] = gradient_strides(activation, grad, gate, up);
  const Tensor gate_grad = new_strided(gate, gate.sizes(), strides);
  Tensor up_grad = new_strided(up, up.sizes(), up_strides);
  // The kernel writes both gradients in one order.
  const Tensor walked_up_grad = up_strides == strides ? up_grad : new_strided(up, up.sizes(), strides);
  const Walk walk(strides, {&grad, &gate, &up});
  run_pointwise(pointwise().act_and_mul_backward, {dtype, walk.rows, walk.cols}, activation, walk.input(0),
                walk.input(1), walk.input(2), walk.output(gate_grad), walk.output(walked_up_grad), kNoMatrix);
  if (up_strides != strides) torch::stable::copy_(up_grad, walked_up_grad);
  return {gate_grad, up_grad};
}

Tensor linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, int64_t activation) {
  check_activation(activation);
  check_linear(x, weight, bias);
  return run(x, {weight, bias, nullptr, nullptr, activation}, nullptr);
}

Tensor gated_linear(const Tensor& x, const Tensor& gate_weight, const Tensor& up_weight,
                    const OptionalTensor& gate_bias, const OptionalTensor& up_bias, int64_t activation) {
  check_activation(activation);
  check_gated_linear(x, gate_weight, up_weight, gate_bias, up_bias);
  return run(x, {gate_weight, gate_bias, &up_weight, &up_bias, activation}, nullptr);
}

std::string plan(const Tensor& x, const Tensor& weight, const OptionalTensor& up_weight,
                 const OptionalTensor& second_weight, const OptionalTensor& bias, const OptionalTensor& up_bias,
                 const OptionalTensor& second_bias, int64_t activation) {
  const HiddenLayer hidden{weight, bias, up_weight ? &*up_weight : nullptr, &up_bias, activation};
  const std::optional<OutputLayer> output =
      second_weight ? std::optional<OutputLayer>({*second_weight, second_bias}) : std::nullopt;
  const Refusal refusal = tiles_refusal(x, hidden, output ? &*output : nullptr);
  const bool few_rows = takes_few_rows(x, count_rows(x), hidden, output ? &*output : nullptr);
  PlanRecord plan;
  const char* const vector = name(std::min(isa(), Isa::kAvx512));
  const auto record = [&](const Tensor& weight, bool pointwise) {
    const bool tiles = refusal == Refusal::kNone;
    const bool vectors = !tiles && vectors::takes_layer(dtype_of(x, "x"), count_rows(x), weight);
    plan.layer().set("implementation", few_rows || vectors ? vector : tiles ? "amx" : "torch");
    if (few_rows || tiles) return;
    vectors ? plan.set("kernel", "matmul") : plan.set("refusal", code(refusal));
    if (pointwise) plan.set("pointwise", vector);
  };
  record(weight, hidden.gated() || static_cast<Activation>(activation) != Activation::kLinear);
  if (output) record(output->weight, false);
  return plan.text();
}

Tensor gated_mlp(const Tensor& x, const Tensor& gate_weight, const Tensor& up_weight, const Tensor& down_weight,
                 const OptionalTensor& gate_bias, const OptionalTensor& up_bias, const OptionalTensor& down_bias,
                 int64_t activation) {
  check_activation(activation);
  check_gated_linear(x, gate_weight, up_weight, gate_bias, up_bias);
  check_second(x, gate_weight, down_weight, down_bias);
  const OutputLayer down{down_weight, down_bias};
  return run(x, {gate_weight, gate_bias, &up_weight, &up_bias, activation}, &down);
}

Tensor mlp(const Tensor& x, const Tensor& fc1_weight, const Tensor& fc2_weight, const OptionalTensor& fc1_bias,
           const OptionalTensor& fc2_bias, int64_t activation) {
  check_activation(activation);
  check_linear(x, fc1_weight, fc1_bias);
  check_second(x, fc1_weight, fc2_weight, fc2_bias);
  const OutputLayer fc2{fc2_weight, fc2_bias};
  return run(x, {fc1_weight, fc1_bias, nullptr, nullptr, activation}, &fc2);
}

std::tuple<Tensor, Tensor, Tensor> training_forward(const Tensor& x, const Tensor& weight,
                                                    const OptionalTensor& up_weight,
                                                    const OptionalTensor& second_weight, const OptionalTensor& bias,
                                                    const OptionalTensor& up_bias, const OptionalTensor& second_bias,
                                                    int64_t activation, bool keep, std::optional<bool> up_first) {
  const FirstLayer first(weight, up_weight, bias, up_bias, up_first);
  check_training(x, first, second_weight, second_bias, activation);
  const HiddenLayer hidden{first.weight, first.bias, first.up_weight ? &*first.up_weight : nullptr, &first.up_bias,
                           activation};
  const std::optional<OutputLayer> second =
      second_weight ? std::optional<OutputLayer>({*second_weight, second_bias}) : std::nullopt;
  const OutputLayer* const output = second ? &*second : nullptr;
  if (!keep) return {run(x, hidden, output), new_dense(x, {0}), new_dense(x, {0})};
  const Tensor flat = flatten_rows(x), out = new_result(x, output ? output->features() : hidden.features());
  const Tensor gate = new_result(x, weight.size(0)), up = up_weight ? new_result(x, weight.size(0)) : new_dense(x, {0});
  const int64_t rows = flat.size(0);
  const Kept kept{matrix_of(gate, rows), up_weight ? matrix_of(up, rows) : up, up_first};
  run_rows(flat, hidden, output, matrix_of(out, rows), &kept);
  return {out, gate, up};
}

std::string plan_training(const Tensor& x, const Tensor& weight, const OptionalTensor& up_weight,
                          const OptionalTensor& second_weight, const OptionalTensor& bias,
                          const OptionalTensor& up_bias, int64_t activation, bool keep) {
  const FirstLayer first(weight, up_weight, bias, up_bias, std::nullopt);
  check_training(x, first, second_weight, std::nullopt, activation);
  const HiddenLayer hidden{first.weight, first.bias, first.up_weight ? &*first.up_weight : nullptr, &first.up_bias,
                           activation};
  const OptionalTensor no_bias;
  const std::optional<OutputLayer> second =
      second_weight ? std::optional<OutputLayer>({*second_weight, no_bias}) : std::nullopt;
  PlanRecord plan;
  const DType dtype = dtype_of(x, "x");
  const int64_t rows = count_rows(x);
  const char* const vector = name(std::min(isa(), Isa::kAvx512));
  const auto record = [&](Refusal refusal, bool vectors) -> PlanRecord& {
    const bool tiles = refusal == Refusal::kNone;
    plan.layer().set("implementation", tiles ? "amx" : vectors ? vector : "torch");
    return tiles || vectors ? plan : plan.set("refusal", code(refusal));
  };
  const OutputLayer* const output = second ? &*second : nullptr;
  if (keep && takes_few_rows(x, rows, hidden, output)) {
    plan.layer().set("implementation", vector);
  } else if (keep) {
    const Refusal refusal = tiles_refusal(x, hidden, output);
    const bool vectors = refusal != Refusal::kNone && vectors::takes_layer(dtype, rows, first.weight);
    record(refusal, vectors);
    if (vectors) plan.set("kernel", "matmul");
  }
  Refusal products = Refusal::kNone;
  const int64_t out_features = second ? second->features() : weight.size(0);
  if (std::min({rows, x.size(-1), weight.size(0), out_features}) < amx::kLeastOfMatmul) {
    products = Refusal::kTorchIsFaster;
  }
  if (isa() != Isa::kAmx) products = Refusal::kInstructionSet;
  if (dtype != DType::kBFloat16) products = Refusal::kFloat32;
  record(products, vectors::takes_backward(dtype, rows, x.size(-1))).set("kernel", "matmul");
  return plan.text();
}

// Measured in training steps of whole models, except those of the scalar code. With products of its own for bfloat16,
// on tiles or where torch's have no instructions for them, an op pays at any size.
int64_t least_recorded(const Tensor& x) {
  if (isa() == Isa::kScalar) return 1 << 17;
  if (dtype_of(x, "x") == DType::kFloat32) return has_wide_vectors() ? 1 << 12 : 1 << 13;
  return isa() == Isa::kAvx512 ? 1 << 20 : 0;
}

std::vector<Tensor> training_backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                      const OptionalTensor& up_weight, const OptionalTensor& second_weight,
                                      const OptionalTensor& bias, const OptionalTensor& up_bias,
                                      const OptionalTensor& gate, const OptionalTensor& up, int64_t activation,
                                      int64_t needs, std::optional<bool> up_first) {
  return gradients<Cpu>(grad, x, weight, up_weight, second_weight, bias, up_bias, gate, up, activation, needs, up_first,
                        false);
}

std::vector<Tensor> training_backward_(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                       const OptionalTensor& up_weight, const OptionalTensor& second_weight,
                                       const OptionalTensor& bias, const OptionalTensor& up_bias, const Tensor& gate,
                                       const OptionalTensor& up, int64_t activation, int64_t needs,
                                       std::optional<bool> up_first) {
  return gradients<Cpu>(grad, x, weight, up_weight, second_weight, bias, up_bias, gate, up, activation, needs, up_first,
                        true);
}

}  // namespace fused_mlp
