// The CPU backend's ops: GEMMs on blocks of rows small enough to stay in cache, the pointwise kernels between them.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <vector>

#include "../torch-ext/activation.h"
#include "../torch-ext/tensor_rows.h"
#include "../torch-ext/torch_binding.h"
#include "amx_mlp.h"
#include "isa.h"
#include "pointwise.h"

namespace fused_mlp {
namespace {

using torch::headeronly::ScalarType;

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

DType dtype_of(const Tensor& tensor, const char* name) {
  const ScalarType dtype = tensor.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::BFloat16, name,
                  " must be float32 or bfloat16 on the CPU, not ", torch::headeronly::toString(dtype));
  return dtype == ScalarType::Float ? DType::kFloat32 : DType::kBFloat16;
}

void check_activation(int64_t activation) {
  STD_TORCH_CHECK(visit_activation(activation, []<Activation>() {}),
                  "activation must be a code of activation.h, not ", activation);
}

// torch's ops called from within ours must not record gradients: `out=` variants refuse to.
class NoGrad {
 public:
  NoGrad() : enabled_(aoti_torch_grad_mode_is_enabled()) { aoti_torch_grad_mode_set_enabled(false); }
  ~NoGrad() { aoti_torch_grad_mode_set_enabled(enabled_); }
  NoGrad(const NoGrad&) = delete;
  NoGrad& operator=(const NoGrad&) = delete;

 private:
  bool enabled_;
};

// An operand that is only read: asking for a mutable pointer would make torch copy a copy-on-write tensor.
Matrix matrix(const TensorRows& rows) { return {const_cast<void*>(rows.tensor.const_data_ptr()), rows.row_stride}; }

Matrix dense_matrix(const Tensor& tensor, int64_t cols) { return {tensor.mutable_data_ptr(), cols}; }

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Applies kernel(shape, activation, operands...) to all the elements, in parallel.
template <typename Kernel, typename... Operands>
void run_pointwise(const Kernel& kernel, PointwiseShape shape, int64_t activation, Operands... operands) {
  if (shape.rows == 0 || shape.cols == 0) return;
  constexpr int64_t kGrain = 16384;  // elements worth a thread
  const int64_t bytes = shape.dtype == DType::kFloat32 ? 4 : 2;
  const auto from = [bytes](const Matrix& m, int64_t element) {
    return Matrix{static_cast<char*>(m.data) + element * bytes, m.row_stride};
  };
  if (((operands.row_stride == shape.cols) && ...)) {  // one long row, to be cut anywhere
    torch::stable::parallel_for(0, shape.rows * shape.cols, kGrain, [&](int64_t begin, int64_t end) {
      kernel(PointwiseShape{shape.dtype, 1, end - begin}, activation, from(operands, begin)...);
    });
  } else {
    torch::stable::parallel_for(0, shape.rows, ceil_div(kGrain, shape.cols), [&](int64_t begin, int64_t end) {
      kernel(PointwiseShape{shape.dtype, end - begin, shape.cols}, activation,
             from(operands, begin * operands.row_stride)...);
    });
  }
}

// [..., cols] as [rows, cols], a view wherever the strides admit one.
Tensor flatten_rows(const Tensor& x) {
  if (x.dim() == 2) return x;
  const auto sizes = x.sizes();
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) rows *= sizes[d];
  return torch::stable::reshape(x, {rows, sizes[x.dim() - 1]});
}

// [rows, cols] back to the leading dimensions of x.
Tensor restore_leading_dims(const Tensor& flat, const Tensor& x) {
  if (x.dim() == 2) return flat;
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = flat.size(1);
  return torch::stable::view(flat, sizes);
}

Tensor new_matrix(const Tensor& like, int64_t rows, int64_t cols) {
  return torch::stable::new_empty(like, {rows, cols});
}

Tensor rows_of(Tensor matrix, int64_t begin, int64_t count) {
  return count == matrix.size(0) ? matrix : torch::stable::narrow(matrix, 0, begin, count);
}

// out = x weight^T + bias, the bias added before the one rounding.
void linear_into(const Tensor& out, const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  using torch::stable::detail::from, torch::stable::detail::to;
  std::array<StableIValue, 4> stack{from(x), from(weight), from(bias), from(out)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::linear", "out", stack.data(), TORCH_ABI_VERSION));
  to<Tensor>(stack[0]);
}

// A projection, or the product of two, with the activation: act(x weight^T + bias) [* (x up_weight^T + up_bias)].
struct HiddenLayer {
  const Tensor& weight;
  const OptionalTensor& bias;
  const Tensor* up_weight;
  const OptionalTensor* up_bias;
  int64_t activation;

  int64_t features() const { return weight.size(0); }

  // `up` is scratch of out's sizes, for a gated layer.
  void compute(const Tensor& out, const Tensor& x, const OptionalTensor& up) const {
    linear_into(out, x, weight, bias);
    const PointwiseShape shape{dtype_of(x, "x"), out.size(0), out.size(1)};
    const Matrix result = dense_matrix(out, shape.cols);
    if (up) {
      linear_into(*up, x, *up_weight, *up_bias);
      run_pointwise(pointwise().act_and_mul, shape, activation, result, dense_matrix(*up, shape.cols), result);
    } else if (static_cast<Activation>(activation) != Activation::kLinear) {
      run_pointwise(pointwise().act, shape, activation, result, result);
    }
  }
};

// Rows in a block: the hidden values of a block and the scratch beside it are to stay in the L2 caches, but a GEMM also
// wants rows enough to be worth the pass over the weights.
int64_t block_rows(const HiddenLayer& layer, DType dtype) {
  const char* env = std::getenv("BLK");
  (void)layer; (void)dtype;
  return env ? std::atoi(env) : 512;
}

// Calls body(first row, number of rows) for consecutive blocks of at most `block` rows.
template <typename Body>
void for_each_block(int64_t rows, int64_t block, const Body& body) {
  for (int64_t begin = 0; begin < rows; begin += block) body(begin, std::min(block, rows - begin));
}

// A projection as the AMX kernels read it; false where the weight's rows are not of adjacent elements.
bool as_projection(const Tensor& weight, const OptionalTensor& bias, amx::Projection& projection) {
  if (weight.size(1) > 1 && weight.stride(1) != 1) return false;
  if (bias && bias->size(0) > 1 && bias->stride(0) != 1) return false;
  projection = {static_cast<const uint16_t*>(weight.const_data_ptr()), weight.stride(0),
                bias ? static_cast<const uint16_t*>(bias->const_data_ptr()) : nullptr};
  return true;
}

bool try_amx(const Tensor& x, const HiddenLayer& layer, const Tensor* weight, const OptionalTensor* bias, const Tensor& out) {
  if (isa() != Isa::kAmx || dtype_of(x, "x") != DType::kBFloat16 || out.numel() == 0) return false;
  amx::Layer hidden{{}, {}, layer.up_weight != nullptr, x.size(x.dim() - 1), layer.features(), layer.activation};
  if (!as_projection(layer.weight, layer.bias, hidden.gate)) return false;
  if (layer.up_weight && !as_projection(*layer.up_weight, *layer.up_bias, hidden.up)) return false;
  amx::Layer down{{}, {}, false, layer.features(), out.size(1), 0};
  if (weight && !as_projection(*weight, *bias, down.gate)) return false;
  const TensorRows rows(x);
  amx::run(rows.tensor, rows.row_stride, rows.rows, hidden, weight ? &down : nullptr, out);
  return true;
}

// The hidden layer's output, [..., features].
Tensor hidden(const Tensor& x, const HiddenLayer& layer) {
  check_activation(layer.activation);
  const int64_t block = block_rows(layer, dtype_of(x, "x"));
  const NoGrad no_grad;
  const Tensor flat = flatten_rows(x);
  const int64_t rows = flat.size(0);
  const Tensor out = new_matrix(x, rows, layer.features());
  if (try_amx(x, layer, nullptr, nullptr, out)) return restore_leading_dims(out, x);
  std::optional<Tensor> up;
  if (layer.up_weight) up = new_matrix(x, std::min(block, rows), layer.features());
  for_each_block(rows, block, [&](int64_t begin, int64_t count) {
    layer.compute(rows_of(out, begin, count), rows_of(flat, begin, count), up ? rows_of(*up, 0, count) : up);
  });
  return restore_leading_dims(out, x);
}

// hidden(x) weight^T + bias
Tensor two_layers(const Tensor& x, const HiddenLayer& layer, const Tensor& weight, const OptionalTensor& bias) {
  check_activation(layer.activation);
  const int64_t block = block_rows(layer, dtype_of(x, "x"));
  const NoGrad no_grad;
  const Tensor flat = flatten_rows(x);
  const int64_t rows = flat.size(0);
  const Tensor out = new_matrix(x, rows, weight.size(0));
  if (try_amx(x, layer, &weight, &bias, out)) return restore_leading_dims(out, x);
  const Tensor hidden = new_matrix(x, std::min(block, rows), layer.features());
  std::optional<Tensor> up;
  if (layer.up_weight) up = new_matrix(x, std::min(block, rows), layer.features());
  for_each_block(rows, block, [&](int64_t begin, int64_t count) {
    const Tensor hidden_rows = rows_of(hidden, 0, count);
    layer.compute(hidden_rows, rows_of(flat, begin, count), up ? rows_of(*up, 0, count) : up);
    linear_into(rows_of(out, begin, count), hidden_rows, weight, bias);
  });
  return restore_leading_dims(out, x);
}

}  // namespace

Tensor act_and_mul(const Tensor& gate, const Tensor& up, int64_t activation) {
  check_activation(activation);
  const DType dtype = dtype_of(gate, "gate");
  const TensorRows gate_rows(gate), up_rows(up);
  const Tensor out = torch::stable::new_empty(gate, gate.sizes());
  run_pointwise(pointwise().act_and_mul, {dtype, gate_rows.rows, gate_rows.cols}, activation, matrix(gate_rows),
                matrix(up_rows), dense_matrix(out, gate_rows.cols));
  return out;
}

std::tuple<Tensor, Tensor> act_and_mul_backward(const Tensor& grad, const Tensor& gate, const Tensor& up,
                                                int64_t activation) {
  check_activation(activation);
  const DType dtype = dtype_of(gate, "gate");
  const TensorRows grad_rows(grad), gate_rows(gate), up_rows(up);
  const Tensor gate_grad = torch::stable::new_empty(gate, gate.sizes());
  const Tensor up_grad = torch::stable::new_empty(up, up.sizes());
  run_pointwise(pointwise().act_and_mul_backward, {dtype, gate_rows.rows, gate_rows.cols}, activation,
                matrix(grad_rows), matrix(gate_rows), matrix(up_rows), dense_matrix(gate_grad, gate_rows.cols),
                dense_matrix(up_grad, gate_rows.cols));
  return {gate_grad, up_grad};
}

Tensor linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, int64_t activation) {
  return hidden(x, {weight, bias, nullptr, nullptr, activation});
}

Tensor gated_linear(const Tensor& x, const Tensor& gate_weight, const Tensor& up_weight,
                    const OptionalTensor& gate_bias, const OptionalTensor& up_bias, int64_t activation) {
  return hidden(x, {gate_weight, gate_bias, &up_weight, &up_bias, activation});
}

std::string plan(const Tensor& x, const Tensor& weight, const OptionalTensor& up_weight, const OptionalTensor& bias,
                 const OptionalTensor& up_bias, int64_t activation) {
  const char* const names[] = {"scalar", "AVX2", "AVX-512", "AMX"};
  return std::string("blocks of rows, ") + names[static_cast<int>(isa())] + " code";
}

Tensor gated_mlp(const Tensor& x, const Tensor& gate_weight, const Tensor& up_weight, const Tensor& down_weight,
                 const OptionalTensor& gate_bias, const OptionalTensor& up_bias, const OptionalTensor& down_bias,
                 int64_t activation) {
  return two_layers(x, {gate_weight, gate_bias, &up_weight, &up_bias, activation}, down_weight, down_bias);
}

Tensor mlp(const Tensor& x, const Tensor& fc1_weight, const Tensor& fc2_weight, const OptionalTensor& fc1_bias,
           const OptionalTensor& fc2_bias, int64_t activation) {
  return two_layers(x, {fc1_weight, fc1_bias, nullptr, nullptr, activation}, fc2_weight, fc2_bias);
}

}  // namespace fused_mlp
