// The CUDA backend's ops. A layer is one fused GEMM where the GPU's architecture has one that suits it, and otherwise
// torch's GEMMs followed by a pointwise kernel.
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

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
#include "device.h"
#include "gemm/architecture.h"
#include "pointwise.h"

namespace fused_mlp {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::accelerator::DeviceGuard;

Matrix dense_matrix(const Tensor& tensor, int64_t cols) { return {tensor.mutable_data_ptr(), cols}; }

constexpr Matrix kNoMatrix{nullptr, 0};
constexpr auto kNoActivation = static_cast<int64_t>(Activation::kLinear);

std::vector<int64_t> with_last_size(const Tensor& x, int64_t size) {
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = size;
  return sizes;
}

// A linear layer, or a gated pair of them: act(x weight^T + bias), times (x up_weight^T + up_bias) where there is one.
struct Layer {
  const Tensor& weight;
  const Tensor* up_weight;
  const OptionalTensor& bias;
  const OptionalTensor& up_bias;
  int64_t activation;
};

const OptionalTensor kNoBias;

// Whether torch's GEMM can do the whole layer: cuBLASLt adds a bias and applies tanh-GELU in its epilogue. In float32
// the activation is left to the pointwise kernel, and where there are no input features torch does not apply it.
// cuBLASLt has ReLU too, but does not document that a NaN passes through it.
bool torch_has_epilogue(const Layer& layer) {
  return static_cast<Activation>(layer.activation) == Activation::kGeluTanh && layer.up_weight == nullptr &&
         layer.bias.has_value() && layer.weight.scalar_type() != ScalarType::Float && layer.weight.size(1) > 0;
}

// The operand of a layer: rows of k elements. The plan of a second layer is made before its operand is there: its data
// is null then.
struct Input {
  Matrix matrix;
  int64_t rows;
  int64_t cols;
  DType dtype;
};

Input input_of(const TensorRows& x) { return {matrix(x), x.rows, x.cols, dtype_of(x.tensor, "x")}; }

// Describes an operand to the kernels, if it lies so that they can read it.
bool describe_weight(const Tensor& weight, Matrix* matrix) {
  if (weight.stride(1) != 1 && weight.size(1) != 1) return false;
  *matrix = {const_cast<void*>(weight.const_data_ptr()), weight.stride(0)};
  return true;
}

bool describe_bias(const OptionalTensor& bias, const void** data) {
  *data = bias.has_value() ? bias->const_data_ptr() : nullptr;
  return !bias.has_value() || bias->size(0) == 1 || bias->stride(0) == 1;
}

// One kernel for a whole layer, or the reason why there is none.
struct FusedGemm {
  const Architecture* architecture;
  const Gpu& gpu;
  GemmProblem problem{};
  GemmPlan plan{};
  Refusal refusal;

  FusedGemm(const Input& x, const Layer& layer, const Gpu& gpu, bool follows_gemm)
      : architecture(architecture_of(gpu)), gpu(gpu), refusal(choose(x, layer, follows_gemm)) {}

  bool fused() const { return refusal == Refusal::kNone; }
  void launch(cudaStream_t stream) const { check(architecture->launch(problem, plan, gpu, stream)); }

 private:
  Refusal choose(const Input& x, const Layer& layer, bool follows_gemm) {
    if (architecture == nullptr) return Refusal::kGpu;
    problem.a = x.matrix;
    problem.m = x.rows;
    problem.n = layer.weight.size(0);
    problem.k = x.cols;
    problem.dtype = x.dtype;
    problem.epilogue.activation = layer.activation;
    problem.follows_gemm = follows_gemm;
    if (!describe_weight(layer.weight, &problem.weight)) return Refusal::kColumnMajorWeight;
    if (layer.up_weight != nullptr && !describe_weight(*layer.up_weight, &problem.up_weight)) {
      return Refusal::kColumnMajorWeight;
    }
    if (!describe_bias(layer.bias, &problem.epilogue.bias) ||
        !describe_bias(layer.up_bias, &problem.epilogue.up_bias)) {
      return Refusal::kStridedBias;
    }
    problem.out = {nullptr, problem.n};
    return choose_gemm(*architecture, problem, gpu, &plan);
  }
};

Tensor torch_linear(const TensorRows& x, const std::vector<int64_t>& out_sizes, const Tensor& weight,
                    const OptionalTensor& bias) {
  const int64_t n = weight.size(0);
  const Tensor out = new_dense(x.tensor, out_sizes);
  linear_into<aoti_torch_cuda_mm_out, aoti_torch_cuda_addmm_out>(
      matrix_view(out, {x.rows, n}, {n, 1}), matrix_view(x.tensor, {x.rows, x.cols}, {x.row_stride, 1}), weight, bias);
  return out;
}

// The layer by torch's GEMM with its epilogue, or by torch's GEMMs and a pointwise kernel that overwrites the first
// one's result.
Tensor torch_layer(const TensorRows& x, const std::vector<int64_t>& out_sizes, const Layer& layer) {
  if (torch_has_epilogue(layer)) {
    const Tensor rows = matrix_view(x.tensor, {x.rows, x.cols}, {x.row_stride, 1});
    constexpr int32_t kUseGelu = 1;
    AtenTensorHandle out = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_cuda__addmm_activation(layer.bias->get(), rows.get(),
                                                             transposed(layer.weight).get(), 1.0, 1.0, kUseGelu, &out));
    return view_of(Tensor(out), out_sizes, dense_strides(out_sizes));
  }
  const Tensor out = torch_linear(x, out_sizes, layer.weight, layer.bias);
  const bool gated = layer.up_weight != nullptr;
  if (!gated && static_cast<Activation>(layer.activation) == Activation::kLinear) return out;
  const TensorRows rows(out);
  const Tensor up = gated ? torch_linear(x, out_sizes, *layer.up_weight, layer.up_bias) : out;
  check(launch_act_and_mul(dense_matrix(out, rows.cols), gated ? dense_matrix(up, rows.cols) : kNoMatrix,
                           dense_matrix(out, rows.cols), rows.rows, rows.cols, dtype_of(out, "x"), layer.activation,
                           current_stream(out)));
  return out;
}

// Computes a layer. On entry *fused says whether the launch before was a fused GEMM, on return whether this one is.
Tensor apply(const Tensor& x, const Layer& layer, bool* fused) {
  const TensorRows rows(x);
  FusedGemm gemm(input_of(rows), layer, gpu(x.get_device_index()), *fused);
  *fused = gemm.fused();
  const auto out_sizes = with_last_size(x, layer.weight.size(0));
  if (!*fused) return torch_layer(rows, out_sizes, layer);
  const Tensor out = new_dense(x, out_sizes);
  gemm.problem.out.data = out.mutable_data_ptr();
  gemm.launch(current_stream(x));
  return out;
}

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

  static Matrix matrix(const Tensor& rows) { return {const_cast<void*>(rows.const_data_ptr()), rows.stride(0)}; }

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

 private:
  static Matrix matrix(const Tensor& rows) { return {const_cast<void*>(rows.const_data_ptr()), rows.stride(0)}; }
};

// Writes down how apply() would compute a layer.
void record(const FusedGemm& gemm, const Layer& layer, PlanRecord* plan) {
  plan->layer();
  if (gemm.fused()) {
    const GemmKernel& kernel = gemm.plan.kernel;
    plan->set("implementation", gemm.architecture->name).set("kernel", name(kernel.loop));
    plan->set("block_m", kernel.block_m).set("block_n", kernel.block_n);
    plan->set("schedule", name(kernel.schedule)).set("split_k", kernel.split_k);
    if (gemm.architecture->modelled()) plan->set("basis", "model");
    return;
  }
  plan->set("implementation", "torch").set("refusal", code(gemm.refusal));
  const bool linear = static_cast<Activation>(layer.activation) == Activation::kLinear;
  if (layer.up_weight != nullptr || !linear) plan->set("pointwise", torch_has_epilogue(layer) ? "epilogue" : "cuda");
}

}  // namespace

Tensor act_and_mul(const Tensor& gate, const Tensor& up, int64_t activation) {
  check_activation(activation);
  check_same_shape(up, "up", gate);
  const DeviceGuard device_guard(gate.get_device_index());
  const Strides strides = product_strides(activation, gate, up);
  const Tensor out = new_strided(gate, gate.sizes(), strides);
  const Walk walk(strides, {&gate, &up});
  check(launch_act_and_mul(walk.input(0), walk.input(1), walk.output(out), walk.rows, walk.cols, dtype_of(gate, "gate"),
                           activation, current_stream(gate)));
  return out;
}

std::tuple<Tensor, Tensor> act_and_mul_backward(const Tensor& grad, const Tensor& gate, const Tensor& up,
                                                int64_t activation) {
  check_activation(activation);
  check_same_shape(gate, "gate", grad);
  check_same_shape(up, "up", grad);
  const DeviceGuard device_guard(gate.get_device_index());
  const auto [strides, up_strides] = gradient_strides(activation, grad, gate, up);
  const Tensor gate_grad = new_strided(gate, gate.sizes(), strides);
  Tensor up_grad = new_strided(up, up.sizes(), up_strides);
  // The kernel writes both gradients in one order.
  const Tensor walked_up_grad = up_strides == strides ? up_grad : new_strided(up, up.sizes(), strides);
  const Walk walk(strides, {&grad, &gate, &up});
  check(launch_act_and_mul_backward(walk.input(0), walk.input(1), walk.input(2), walk.output(gate_grad),
                                    walk.output(walked_up_grad), walk.rows, walk.cols, dtype_of(gate, "gate"),
                                    activation, current_stream(gate)));
  if (up_strides != strides) torch::stable::copy_(up_grad, walked_up_grad);
  return {gate_grad, up_grad};
}

std::string plan(const Tensor& x, const Tensor& weight, const OptionalTensor& up_weight,
                 const OptionalTensor& second_weight, const OptionalTensor& bias, const OptionalTensor& up_bias,
                 const OptionalTensor& second_bias, int64_t activation) {
  const Gpu& device = gpu(x.get_device_index());
  const Layer layer{weight, up_weight ? &*up_weight : nullptr, bias, up_bias, activation};
  const TensorRows rows(x);
  const Input input = input_of(rows);
  const FusedGemm gemm(input, layer, device, false);
  PlanRecord plan;
  record(gemm, layer, &plan);
  if (second_weight) {
    const int64_t features = weight.size(0);
    const Layer second{*second_weight, nullptr, second_bias, kNoBias, kNoActivation};
    record(FusedGemm({{nullptr, features}, input.rows, features, input.dtype}, second, device, gemm.fused()), second,
           &plan);
  }
  return plan.text();
}

Tensor linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, int64_t activation) {
  check_activation(activation);
  check_linear(x, weight, bias);
  const DeviceGuard device_guard(x.get_device_index());
  bool fused = false;
  return apply(x, {weight, nullptr, bias, kNoBias, activation}, &fused);
}

Tensor gated_linear(const Tensor& x, const Tensor& gate_weight, const Tensor& up_weight,
                    const OptionalTensor& gate_bias, const OptionalTensor& up_bias, int64_t activation) {
  check_activation(activation);
  check_gated_linear(x, gate_weight, up_weight, gate_bias, up_bias);
  const DeviceGuard device_guard(x.get_device_index());
  bool fused = false;
  return apply(x, {gate_weight, &up_weight, gate_bias, up_bias, activation}, &fused);
}

Tensor gated_mlp(const Tensor& x, const Tensor& gate_weight, const Tensor& up_weight, const Tensor& down_weight,
                 const OptionalTensor& gate_bias, const OptionalTensor& up_bias, const OptionalTensor& down_bias,
                 int64_t activation) {
  check_activation(activation);
  check_gated_linear(x, gate_weight, up_weight, gate_bias, up_bias);
  check_second(x, gate_weight, down_weight, down_bias);
  const DeviceGuard device_guard(x.get_device_index());
  bool fused = false;
  const Tensor hidden = apply(x, {gate_weight, &up_weight, gate_bias, up_bias, activation}, &fused);
  return apply(hidden, {down_weight, nullptr, down_bias, kNoBias, kNoActivation}, &fused);
}

Tensor mlp(const Tensor& x, const Tensor& fc1_weight, const Tensor& fc2_weight, const OptionalTensor& fc1_bias,
           const OptionalTensor& fc2_bias, int64_t activation) {
  check_activation(activation);
  check_linear(x, fc1_weight, fc1_bias);
  check_second(x, fc1_weight, fc2_weight, fc2_bias);
  const DeviceGuard device_guard(x.get_device_index());
  bool fused = false;
  const Tensor hidden = apply(x, {fc1_weight, nullptr, fc1_bias, kNoBias, activation}, &fused);
  return apply(hidden, {fc2_weight, nullptr, fc2_bias, kNoBias, kNoActivation}, &fused);
}

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
    Tensor out = apply(x, {first.weight, up, first.bias, first.up_bias, activation}, &fused);
    if (second_weight) out = apply(out, {*second_weight, nullptr, second_bias, kNoBias, kNoActivation}, &fused);
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
