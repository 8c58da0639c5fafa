// The CUDA backend's ops of training: torch's GEMMs and pointwise kernels, or, where the GPU's architecture has them,
// GEMMs that do the pointwise work in their epilogues.
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>
#include <torch/csrc/stable/accelerator.h>

#include <vector>

#include "../torch-ext/backward.h"
#include "../torch-ext/operands.h"
#include "../torch-ext/tensor_rows.h"
#include "../torch-ext/torch_binding.h"
#include "../torch-ext/torch_gemm.h"
#include "column_sums.h"
#include "device.h"
#include "gemm/architecture.h"
#include "gemm/record.h"
#include "layer.h"
#include "pointwise.h"
#include "torch_layer.h"

namespace fused_mlp {
namespace {

using torch::stable::accelerator::DeviceGuard;

// A tensor that is a matrix of adjacent elements in its rows.
Matrix matrix(const Tensor& rows) { return {const_cast<void*>(rows.const_data_ptr()), rows.stride(0)}; }

// The left side of a product.
struct Left {
  Matrix operand;
  int64_t rows;
  DType dtype;
  int32_t device;

  Left(const Tensor& a) : operand(matrix(a)), rows(a.size(0)), dtype(dtype_of(a, "x")), device(a.get_device_index()) {}
  // One that is not there yet, with as many rows as another.
  Left(const Left& other, int64_t cols) : Left(other) { operand = {nullptr, cols}; }
};

// A kernel for a product of training, or none. Its outputs are there only when it is launched.
class TrainingGemm {
 public:
  explicit operator bool() const { return refusal_ == Refusal::kNone; }

  int64_t ctas() const { return *this ? ctas_of(problem_, plan_.kernel) : 0; }

  void record(PlanRecord* plan) const {
    plan->layer();
    if (*this) {
      record_kernel(plan_.architecture->name, plan_.kernel, guesses(plan_, gpu(device_)), plan);
    } else {
      plan->set("implementation", "torch").set("refusal", code(refusal_));
      if (problem_.kind != Product::kPair) plan->set("pointwise", "cuda");
    }
  }

 protected:
  TrainingGemm() = default;

  // The product of a and a matrix weight, which is [k, n], or for a kept product [n, k].
  TrainingGemm(Product kind, const Left& a, const Tensor& weight, int64_t activation) : device_(a.device) {
    const bool lies = reads_weights_as_they_lie(kind);
    described_ = describe_weight(weight, &problem_.weight);
    problem_.kind = kind;
    problem_.a = a.operand;
    problem_.m = a.rows;
    problem_.n = weight.size(lies ? 1 : 0);
    problem_.k = weight.size(lies ? 0 : 1);
    problem_.out = {nullptr, problem_.n};
    problem_.dtype = a.dtype;
    problem_.epilogue.activation = activation;
  }

  // `launcher` matters to a pair alone.
  void choose(Launcher launcher = Launcher::kGraph) {
    architecture_ = architecture_of(gpu(device_));
    if (architecture_ == nullptr) return;
    refusal_ = described_ ? choose_gemm(*architecture_, problem_, gpu(device_), &plan_, launcher)
                          : Refusal::kColumnMajorWeight;
  }

  void launch_on_stream_of(const Tensor& tensor) const {
    check(plan_.architecture->launch(problem_, plan_, gpu(device_), current_stream(tensor)));
  }

  GemmProblem problem_{};
  bool described_ = false;  // true if the weights' rows and the biases have adjacent elements

 private:
  const Architecture* architecture_ = nullptr;
  GemmPlan plan_{};
  Refusal refusal_ = Refusal::kGpu;
  int32_t device_ = 0;
};

// A first layer, and what its backward needs.
struct KeptGemm : TrainingGemm {
  KeptGemm() = default;
  KeptGemm(const Left& x, const FirstLayer& first, int64_t activation)
      : TrainingGemm(first.up_weight ? Product::kGatedKept : Product::kPlainKept, x, first.weight, activation) {
    EpilogueArgs& epilogue = problem_.epilogue;
    described_ = described_ && describe_bias(first.bias, &epilogue.bias) &&
                 describe_bias(first.up_bias, &epilogue.up_bias) &&
                 (!first.up_weight || describe_weight(*first.up_weight, &problem_.up_weight));
    choose();
  }

  void launch(const Tensor& gate, const OptionalTensor& up, const Tensor& values) {
    problem_.training.gate = matrix(gate);
    if (up) problem_.training.up = matrix(*up);
    problem_.out = matrix(values);
    launch_on_stream_of(values);
  }
};

struct HiddenGradients : TrainingGemm {
  HiddenGradients() = default;
  // `up` is kNoMatrix where there is none.
  HiddenGradients(bool gated, const Left& grad, const Tensor& weight, const Matrix& gate, const Matrix& up,
                  int64_t activation)
      : TrainingGemm(gated ? Product::kGatedGradient : Product::kPlainGradient, grad, weight, activation) {
    problem_.training.gate = gate;
    problem_.training.up = up;
    choose();
  }

  void launch(const Tensor& dgate, const OptionalTensor& dup, const OptionalTensor& values) {
    problem_.training.gate_gradient = matrix(dgate);
    if (dup) problem_.training.up_gradient = matrix(*dup);
    if (values) problem_.out = matrix(*values);
    launch_on_stream_of(dgate);
  }
};

struct InputGradient : TrainingGemm {
  InputGradient() = default;
  InputGradient(const Left& dgate, const Tensor& weight, const Matrix& dup, const Tensor& up_weight)
      : TrainingGemm(Product::kPair, dgate, weight, kNoActivation) {
    problem_.training.second_a = dup;
    described_ = described_ && describe_weight(up_weight, &problem_.training.second_weight);
    choose(is_captured(current_stream(weight)) ? Launcher::kGraph : Launcher::kCpu);
  }

  void launch(const Tensor& dx) {
    problem_.out = matrix(dx);
    launch_on_stream_of(dx);
  }
};

// The functions that backward.h asks of a backend.
struct Cuda {
  static void linear_into(const Tensor& out, const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
    fused_mlp::linear_into<aoti_torch_cuda_mm_out, aoti_torch_cuda_addmm_out>(out, x, weight, bias);
  }

  static constexpr bool kHasSums = true;

  static void mm(const Tensor& out, const Tensor& a, const Tensor& b) {
    if (out.scalar_type() == a.scalar_type()) {
      TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_mm_out(out.get(), a.get(), b.get()));
    } else {
      TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_mm_dtype_out(out.get(), a.get(), b.get(), aoti_torch_dtype_float32()));
    }
  }

  static void add(const Tensor& sum, const Tensor& term) {
    check(launch_add(sum.mutable_data_ptr(), term.mutable_data_ptr(), sum.numel(), current_stream(sum)));
  }

  static void add_mm(const Tensor& out, const Tensor& a, const Tensor& b) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_addmm_out(out.get(), out.get(), a.get(), b.get(), 1.0, 1.0));
  }

  // Alone, a product for a small weight has too few tiles for the chip. One more of a large weight gains nothing.
  static bool batches(const Tensor& like, int64_t elements) {
    constexpr int64_t kSmall = 1 << 24;
    return dtype_of(like, "grad") != DType::kFloat32 && elements <= kSmall;
  }

  // The four matrices are tensors of their own. The stride of a batch is the distance between its two.
  static void mm_both(Tensor& out, Tensor& up_out, const Tensor& a, const Tensor& up_a, const Tensor& x) {
    const auto address = [](const Tensor& matrix) { return static_cast<const uint16_t*>(matrix.const_data_ptr()); };
    const auto batch = [&](const Tensor& first, const Tensor& second) {
      return view_of(first, std::array<int64_t, 3>{2, first.size(0), first.size(1)},
                     std::array{address(second) - address(first), first.stride(0), first.stride(1)});
    };
    const bool ascending = address(a) < address(up_a);
    if (ascending != (address(out) < address(up_out))) std::swap(out, up_out);
    const Tensor outs = ascending ? batch(out, up_out) : batch(up_out, out);
    const Tensor sides = ascending ? batch(transposed(a), transposed(up_a)) : batch(transposed(up_a), transposed(a));
    const Tensor twice =
        view_of(x, std::array<int64_t, 3>{2, x.size(0), x.size(1)}, std::array{int64_t{0}, x.stride(0), x.stride(1)});
    TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_bmm_out(outs.get(), sides.get(), twice.get()));
  }

  static Tensor column_sums(const Tensor& x, std::optional<torch::headeronly::ScalarType> dtype) {
    const int64_t rows = x.size(0), cols = x.size(1);
    const int64_t parts = parts_of_column_sums(rows, cols, gpu(x.get_device_index()).multiprocessors);
    const Tensor out = new_dense(x, {cols}, dtype);
    OptionalTensor partial;
    if (parts > 1) partial = new_dense(x, {parts, cols}, torch::headeronly::ScalarType::Float);
    check(launch_column_sums(matrix(x), rows, cols, dtype_of(x, "grad"), out.mutable_data_ptr(), dtype_of(out, "bias"),
                             partial ? static_cast<float*>(partial->mutable_data_ptr()) : nullptr, parts,
                             current_stream(x)));
    return out;
  }

  static Tensor rows(const Tensor& x) {
    const TensorRows found(x);
    return matrix_view(found.tensor, {found.rows, found.cols}, {found.row_stride, 1});
  }

  static void apply(const Tensor& gate, const OptionalTensor& up, const Tensor& out, int64_t activation) {
    check(launch_act_and_mul(matrix(gate), up ? matrix(*up) : kNoMatrix, matrix(out), gate.size(0), gate.size(1),
                             dtype_of(gate, "x"), activation, current_stream(gate)));
  }

  static void differentiate(const Tensor& grad, const Tensor& gate, const OptionalTensor& up, const Tensor& dgate,
                            const OptionalTensor& dup, const OptionalTensor& values, int64_t activation) {
    const auto if_any = [](const OptionalTensor& rows) { return rows ? matrix(*rows) : kNoMatrix; };
    check(launch_act_and_mul_backward(matrix(grad), matrix(gate), if_any(up), matrix(dgate), if_any(dup),
                                      if_any(values), gate.size(0), gate.size(1), dtype_of(gate, "x"), activation,
                                      current_stream(gate)));
  }

  static KeptGemm kept_values(const Tensor& x, const FirstLayer& first, int64_t activation) {
    return {x, first, activation};
  }

  static HiddenGradients hidden_gradients(const Tensor& grad, const Tensor& weight, const Tensor& gate,
                                          const OptionalTensor& up, int64_t activation) {
    return {up.has_value(), grad, weight, matrix(gate), up ? matrix(*up) : kNoMatrix, activation};
  }

  static InputGradient input_gradient(const Tensor& dgate, const Tensor& weight, const Tensor& dup,
                                      const Tensor& up_weight) {
    return {dgate, weight, matrix(dup), up_weight};
  }
};

// The result alone. Where the backward makes hidden values again block by block of rows, no more are made at once here.
Tensor forward(const Tensor& x, const FirstLayer& first, const OptionalTensor& second_weight,
               const OptionalTensor& second_bias, int64_t activation) {
  const Layer layer{first.weight, first.up_weight ? &*first.up_weight : nullptr, first.bias, first.up_bias, activation};
  if (!second_weight) return apply_layer(x, layer);
  const Tensor x_rows = Cuda::rows(x);
  const int64_t rows = x_rows.size(0), block = rows_of_a_block(rows, x_rows.size(1), first.weight.size(0));
  if (block == rows) {
    return apply_layers(x, layer, {*second_weight, nullptr, second_bias, kNoBias, kNoActivation});
  }
  const Tensor out = new_dense(x, with_last_size(x, second_weight->size(0)));
  const Tensor out_rows = matrix_view(out, {rows, out.size(-1)}, {out.size(-1), 1});
  for (int64_t start = 0; start < rows; start += block) {
    const int64_t count = std::min(block, rows - start);
    const Tensor hidden = apply_layer(rows_of(x_rows, start, count), layer);
    Cuda::linear_into(rows_of(out_rows, start, count), hidden, *second_weight, second_bias);
  }
  return out;
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> training_forward(const Tensor& x, const Tensor& weight,
                                                    const OptionalTensor& up_weight,
                                                    const OptionalTensor& second_weight, const OptionalTensor& bias,
                                                    const OptionalTensor& up_bias, const OptionalTensor& second_bias,
                                                    int64_t activation, bool keep, std::optional<bool> up_first) {
  const FirstLayer first(weight, up_weight, bias, up_bias, up_first);
  check_training(x, first, second_weight, second_bias, activation);
  const DeviceGuard device_guard(x.get_device_index());
  if (!keep) return {forward(x, first, second_weight, second_bias, activation), new_dense(x, {0}), new_dense(x, {0})};
  const TensorRows rows(x);
  const auto sizes = with_last_size(x, weight.size(0));
  KeptGemm fused(Cuda::rows(x), first, activation);
  const auto kept = [&](const Tensor& weight, const OptionalTensor& bias) {
    return fused ? new_dense(x, sizes) : torch_linear(rows, sizes, weight, bias);
  };
  const Tensor gate = kept(weight, bias), hidden = new_dense(x, with_last_size(x, first.weight.size(0)));
  const OptionalTensor up = up_weight ? OptionalTensor(kept(*up_weight, up_bias)) : std::nullopt;
  const auto run = [&](const Tensor& gate, const OptionalTensor& up) {
    fused ? fused.launch(gate, up, Cuda::rows(hidden)) : Cuda::apply(gate, up, Cuda::rows(hidden), activation);
  };
  if (up_first) {
    const auto [gate_rows, up_rows] = halves_of(gate, rows.rows, *up_first);
    run(gate_rows, up_rows);
  } else {
    run(Cuda::rows(gate), up ? OptionalTensor(Cuda::rows(*up)) : std::nullopt);
  }
  Tensor out = hidden;
  if (second_weight) {
    out = apply_layer(hidden, {*second_weight, nullptr, second_bias, kNoBias, kNoActivation}, {fused.ctas()});
  }
  return {out, gate, up ? *up : new_dense(x, {0})};
}

std::string plan_training(const Tensor& x, const Tensor& weight, const OptionalTensor& up_weight,
                          const OptionalTensor& second_weight, const OptionalTensor& bias,
                          const OptionalTensor& up_bias, int64_t activation, bool keep) {
  const FirstLayer first(weight, up_weight, bias, up_bias, std::nullopt);
  check_training(x, first, second_weight, std::nullopt, activation);
  const Left rows(Cuda::rows(x));
  const Matrix hidden{nullptr, weight.size(0)};
  PlanRecord plan;
  if (keep) KeptGemm(rows, first, activation).record(&plan);
  if (second_weight) {
    const Left grad(rows, second_weight->size(0));
    HiddenGradients(up_weight.has_value(), grad, *second_weight, hidden, up_weight ? hidden : kNoMatrix, activation)
        .record(&plan);
  }
  if (up_weight) InputGradient(Left(rows, weight.size(0)), weight, hidden, *up_weight).record(&plan);
  return plan.text();
}

std::vector<Tensor> training_backward(const Tensor& grad, const OptionalTensor& x, const OptionalTensor& weight,
                                      const OptionalTensor& up_weight, const OptionalTensor& second_weight,
                                      const OptionalTensor& bias, const OptionalTensor& up_bias,
                                      const OptionalTensor& gate, const OptionalTensor& up, int64_t activation,
                                      int64_t needs, std::optional<bool> up_first) {
  const DeviceGuard device_guard(grad.get_device_index());
  return gradients<Cuda>(grad, x, weight, up_weight, second_weight, bias, up_bias, gate, up, activation, needs,
                         up_first, false);
}

std::vector<Tensor> training_backward_(const Tensor& grad, const OptionalTensor& x, const OptionalTensor& weight,
                                       const OptionalTensor& up_weight, const OptionalTensor& second_weight,
                                       const OptionalTensor& bias, const OptionalTensor& up_bias, const Tensor& gate,
                                       const OptionalTensor& up, int64_t activation, int64_t needs,
                                       std::optional<bool> up_first) {
  const DeviceGuard device_guard(grad.get_device_index());
  return gradients<Cuda>(grad, x, weight, up_weight, second_weight, bias, up_bias, gate, up, activation, needs,
                         up_first, true);
}

}  // namespace fused_mlp
