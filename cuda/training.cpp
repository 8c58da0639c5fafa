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
#include "device.h"
#include "gemm/architecture.h"
#include "layer.h"
#include "pointwise.h"

namespace fused_mlp {
namespace {

using torch::stable::accelerator::DeviceGuard;

// A tensor that is a matrix of adjacent elements in its rows.
Matrix matrix(const Tensor& rows) { return {const_cast<void*>(rows.const_data_ptr()), rows.stride(0)}; }

// A kernel for a product of training, or none. Its outputs are there only when it is launched.
class TrainingGemm {
 public:
  explicit operator bool() const { return architecture_ != nullptr; }

 protected:
  TrainingGemm() = default;

  // Of matrices a and weight, where weight is [k, n] or, of a kept product, [n, k].
  TrainingGemm(Product kind, const Tensor& a, const Tensor& weight, int64_t activation)
      : device_(a.get_device_index()) {
    const bool lies = reads_weights_as_they_lie(kind);
    described_ = describe_weight(weight, &problem_.weight);
    problem_.kind = kind;
    problem_.a = matrix(a);
    problem_.m = a.size(0);
    problem_.n = weight.size(lies ? 1 : 0);
    problem_.k = weight.size(lies ? 0 : 1);
    problem_.out = {nullptr, problem_.n};
    problem_.dtype = dtype_of(a, "x");
    problem_.epilogue.activation = activation;
  }

  void choose() {
    const Architecture* const found = architecture_of(gpu(device_));
    if (found == nullptr || !described_) return;
    if (choose_gemm(*found, problem_, gpu(device_), &plan_) == Refusal::kNone) architecture_ = found;
  }

  void launch_on_stream_of(const Tensor& tensor) const {
    check(architecture_->launch(problem_, plan_, gpu(device_), current_stream(tensor)));
  }

  GemmProblem problem_{};
  bool described_ = false;

 private:
  const Architecture* architecture_ = nullptr;
  GemmPlan plan_{};
  int32_t device_ = 0;
};

// A first layer, and what its backward needs.
struct KeptGemm : TrainingGemm {
  KeptGemm(const Tensor& x, const FirstLayer& first, int64_t activation)
      : TrainingGemm(first.up_weight ? Product::kGatedKept : Product::kPlainKept, x, first.weight, activation) {
    EpilogueArgs& epilogue = problem_.epilogue;
    described_ = described_ && describe_bias(first.bias, &epilogue.bias) &&
                 describe_bias(first.up_bias, &epilogue.up_bias) &&
                 (!first.up_weight || describe_weight(*first.up_weight, &problem_.up_weight));
    choose();
  }

  void launch(const Tensor& gate, const OptionalTensor& up, const Tensor& hidden) {
    problem_.training.gate = matrix(gate);
    if (up) problem_.training.up = matrix(*up);
    problem_.out = matrix(hidden);
    launch_on_stream_of(hidden);
  }
};

struct HiddenGradients : TrainingGemm {
  HiddenGradients() = default;
  HiddenGradients(const Tensor& grad, const Tensor& weight, const Tensor& gate, const OptionalTensor& up,
                  int64_t activation)
      : TrainingGemm(up ? Product::kGatedGradient : Product::kPlainGradient, grad, weight, activation) {
    problem_.training.gate = matrix(gate);
    if (up) problem_.training.up = matrix(*up);
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
  InputGradient(const Tensor& dgate, const Tensor& weight, const Tensor& dup, const Tensor& up_weight)
      : TrainingGemm(Product::kPair, dgate, weight, kNoActivation) {
    problem_.training.second_a = matrix(dup);
    described_ = described_ && describe_weight(up_weight, &problem_.training.second_weight);
    choose();
  }

  void launch(const Tensor& dx) {
    problem_.out = matrix(dx);
    launch_on_stream_of(dx);
  }
};

// What backward.h asks of a backend.
struct Cuda {
  static void linear_into(const Tensor& out, const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
    fused_mlp::linear_into<aoti_torch_cuda_mm_out, aoti_torch_cuda_addmm_out>(out, x, weight, bias);
  }

  static void mm(const Tensor& out, const Tensor& a, const Tensor& b) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_mm_out(out.get(), a.get(), b.get()));
  }

  static void add_mm(const Tensor& out, const Tensor& a, const Tensor& b) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_addmm_out(out.get(), out.get(), a.get(), b.get(), 1.0, 1.0));
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
                            const OptionalTensor& dup, int64_t activation) {
    check(launch_act_and_mul_backward(matrix(grad), matrix(gate), up ? matrix(*up) : kNoMatrix, matrix(dgate),
                                      dup ? matrix(*dup) : kNoMatrix, gate.size(0), gate.size(1), dtype_of(gate, "x"),
                                      activation, current_stream(gate)));
  }

  static HiddenGradients hidden_gradients(const Tensor& grad, const Tensor& weight, const Tensor& gate,
                                          const OptionalTensor& up, int64_t activation) {
    return {grad, weight, gate, up, activation};
  }

  static InputGradient input_gradient(const Tensor& dgate, const Tensor& weight, const Tensor& dup,
                                      const Tensor& up_weight) {
    return {dgate, weight, dup, up_weight};
  }
};

}  // namespace

std::tuple<Tensor, Tensor, Tensor> training_forward(const Tensor& x, const Tensor& weight,
                                                    const OptionalTensor& up_weight,
                                                    const OptionalTensor& second_weight, const OptionalTensor& bias,
                                                    const OptionalTensor& up_bias, const OptionalTensor& second_bias,
                                                    int64_t activation, bool keep, std::optional<bool> up_first) {
  const FirstLayer first(weight, up_weight, bias, up_bias, up_first);
  check_training(x, first, second_weight, second_bias, activation);
  const DeviceGuard device_guard(x.get_device_index());
  if (!keep) {
    bool fused = false;
    const Tensor* const up = first.up_weight ? &*first.up_weight : nullptr;
    Tensor out = apply_layer(x, {first.weight, up, first.bias, first.up_bias, activation}, &fused);
    if (second_weight) out = apply_layer(out, {*second_weight, nullptr, second_bias, kNoBias, kNoActivation}, &fused);
    return {out, new_dense(x, {0}), new_dense(x, {0})};
  }
  const TensorRows rows(x);
  const auto sizes = with_last_size(x, weight.size(0));
  KeptGemm fused(Cuda::rows(x), first, activation);
  const auto kept = [&](const Tensor& weight, const OptionalTensor& bias) {
    return fused ? new_dense(x, sizes) : torch_linear(rows, sizes, weight, bias);
  };
  const Tensor gate = kept(weight, bias), hidden = new_dense(x, with_last_size(x, first.weight.size(0)));
  const OptionalTensor up = up_weight ? OptionalTensor(kept(*up_weight, up_bias)) : std::nullopt;
  const TensorRows hidden_rows(hidden);
  const auto run = [&](const Tensor& gate, const OptionalTensor& up) {
    fused ? fused.launch(gate, up, Cuda::rows(hidden)) : Cuda::apply(gate, up, Cuda::rows(hidden), activation);
  };
  if (up_first) {
    const auto [gate_rows, up_rows] = halves_of(gate, rows.rows, *up_first);
    run(gate_rows, up_rows);
  } else {
    run(Cuda::rows(gate), up ? OptionalTensor(Cuda::rows(*up)) : std::nullopt);
  }
  const Tensor out =
      second_weight ? torch_linear(hidden_rows, with_last_size(x, second_weight->size(0)), *second_weight, second_bias)
                    : hidden;
  return {out, gate, up ? *up : new_dense(x, {0})};
}

std::vector<Tensor> training_backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                      const OptionalTensor& up_weight, const OptionalTensor& second_weight,
                                      const OptionalTensor& bias, const OptionalTensor& up_bias,
                                      const OptionalTensor& gate, const OptionalTensor& up, int64_t activation,
                                      int64_t needs, std::optional<bool> up_first) {
  const DeviceGuard device_guard(x.get_device_index());
  return gradients<Cuda>(grad, x, weight, up_weight, second_weight, bias, up_bias, gate, up, activation, needs,
                         up_first, false);
}

std::vector<Tensor> training_backward_(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                       const OptionalTensor& up_weight, const OptionalTensor& second_weight,
                                       const OptionalTensor& bias, const OptionalTensor& up_bias, const Tensor& gate,
                                       const OptionalTensor& up, int64_t activation, int64_t needs,
                                       std::optional<bool> up_first) {
  const DeviceGuard device_guard(x.get_device_index());
  return gradients<Cuda>(grad, x, weight, up_weight, second_weight, bias, up_bias, gate, up, activation, needs,
                         up_first, true);
}

}  // namespace fused_mlp
