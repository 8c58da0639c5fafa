#include "layer.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>

#include <string>

#include "../torch-ext/operands.h"
#include "../torch-ext/plan.h"
#include "../torch-ext/torch_gemm.h"
#include "device.h"
#include "gemm/architecture.h"
#include "gemm/record.h"
#include "pointwise.h"

namespace fused_mlp {
namespace {

using torch::headeronly::ScalarType;

Matrix dense_matrix(const Tensor& tensor, int64_t cols) { return {tensor.mutable_data_ptr(), cols}; }

// Whether torch's GEMM can do the whole layer: cuBLASLt adds a bias and applies tanh-GELU in its epilogue. In float32
// the activation is left to the pointwise kernel, and where there are no input features torch does not apply it.
// cuBLASLt has ReLU too, but does not document that a NaN passes through it.
bool torch_has_epilogue(const Layer& layer) {
  return static_cast<Activation>(layer.activation) == Activation::kGeluTanh && layer.up_weight == nullptr &&
         layer.bias.has_value() && layer.weight.scalar_type() != ScalarType::Float && layer.weight.size(1) > 0;
}

// The operand of a layer: rows of k elements.
struct Input {
  Matrix matrix;
  int64_t rows;
  int64_t cols;
  DType dtype;
};

Input input_of(const TensorRows& x) { return {matrix(x), x.rows, x.cols, dtype_of(x.tensor, "x")}; }

// One kernel for a whole layer, or the reason why there is none.
struct FusedGemm {
  const Architecture* architecture;
  const Gpu& gpu;
  cudaStream_t stream;
  bool launched_behind;  // another GEMM of ours, by the CPU: what is chosen then may not be in a graph
  GemmProblem problem{};
  GemmPlan plan{};
  Refusal refusal;

  FusedGemm(const Input& x, const Layer& layer, const Gpu& gpu, cudaStream_t stream, bool follows_gemm)
      : architecture(architecture_of(gpu)),
        gpu(gpu),
        stream(stream),
        launched_behind(follows_gemm && !is_captured(stream)),
        refusal(choose(x, layer, follows_gemm)) {}

  // That of a layer of this one's result, planned before either is launched: its operand has no data yet.
  FusedGemm behind(const Layer& layer) const {
    return {{{nullptr, problem.n}, problem.m, problem.n, problem.dtype}, layer, gpu, stream, fused()};
  }

  bool fused() const { return refusal == Refusal::kNone; }
  void launch(const void* a, void* out) {
    problem.a.data = const_cast<void*>(a);
    problem.out.data = out;
    check(plan.architecture->launch(problem, plan, gpu, stream));
  }

 private:
  Refusal choose(const Input& x, const Layer& layer, bool follows_gemm) {
    problem.a = x.matrix;
    problem.m = x.rows;
    problem.n = layer.weight.size(0);
    problem.k = x.cols;
    problem.dtype = x.dtype;
    problem.epilogue.activation = layer.activation;
    problem.follows_gemm = follows_gemm;
    if (architecture == nullptr) return Refusal::kGpu;
    if (!describe_weight(layer.weight, &problem.weight)) return Refusal::kColumnMajorWeight;
    if (layer.up_weight != nullptr && !describe_weight(*layer.up_weight, &problem.up_weight)) {
      return Refusal::kColumnMajorWeight;
    }
    if (!describe_bias(layer.bias, &problem.epilogue.bias) ||
        !describe_bias(layer.up_bias, &problem.epilogue.up_bias)) {
      return Refusal::kStridedBias;
    }
    problem.out = {nullptr, problem.n};
    return choose_gemm(*architecture, problem, gpu, &plan, launched_behind);
  }
};

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

// Memory of torch's allocator without a tensor around it, which the CPU has in a third of the time. What is queued on
// the stream may use it still when it is given back, as with a tensor's.
class Scratch {
 public:
  explicit Scratch(int64_t bytes) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_caching_allocator_raw_alloc(bytes, &data_));
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { aoti_torch_cuda_caching_allocator_raw_delete(data_); }
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

// Has torch make the cuBLAS handle that a thread's first product on a GPU needs, where a GEMM of ours may be torch's in
// a graph: a handle cannot be made while a stream is captured, and all products before may have been ours.
void make_cublas_handle(const FusedGemm& gemm, const Tensor& like) {
  if (!gemm.fused() || !gemm.launched_behind) return;
  static thread_local uint64_t made = 0;  // a bit for each GPU
  const uint64_t gpu = uint64_t{1} << like.get_device_index() % 64;
  if (made & gpu) return;
  const std::vector<int64_t> sizes{8, 8};
  const Tensor operand = new_dense(like, sizes), out = new_dense(like, sizes);
  TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_mm_out(out.get(), operand.get(), operand.get()));
  made |= gpu;
}

Tensor run(FusedGemm* gemm, const TensorRows& rows, const Tensor& x, const Layer& layer) {
  const auto out_sizes = with_last_size(x, layer.weight.size(0));
  if (!gemm->fused()) return torch_layer(rows, out_sizes, layer);
  const Tensor out = new_dense(x, out_sizes);
  gemm->launch(rows.tensor.const_data_ptr(), out.mutable_data_ptr());
  return out;
}

// Writes down how a layer would be computed.
void record(const FusedGemm& gemm, const Layer& layer, PlanRecord* plan) {
  plan->layer();
  if (gemm.fused()) {
    record_kernel(gemm.plan.architecture->name, gemm.plan.kernel, guesses(gemm.plan, gemm.gpu), plan);
    return;
  }
  plan->set("implementation", "torch").set("refusal", code(gemm.refusal));
  const bool linear = static_cast<Activation>(layer.activation) == Activation::kLinear;
  if (layer.up_weight != nullptr || !linear) plan->set("pointwise", torch_has_epilogue(layer) ? "epilogue" : "cuda");
}

}  // namespace

Tensor torch_linear(const TensorRows& x, const std::vector<int64_t>& out_sizes, const Tensor& weight,
                    const OptionalTensor& bias) {
  const int64_t n = weight.size(0);
  const Tensor out = new_dense(x.tensor, out_sizes);
  linear_into<aoti_torch_cuda_mm_out, aoti_torch_cuda_addmm_out>(
      matrix_view(out, {x.rows, n}, {n, 1}), matrix_view(x.tensor, {x.rows, x.cols}, {x.row_stride, 1}), weight, bias);
  return out;
}

Tensor apply_layer(const Tensor& x, const Layer& layer, bool follows_gemm) {
  const TensorRows rows(x);
  FusedGemm gemm(input_of(rows), layer, gpu(x.get_device_index()), current_stream(x), follows_gemm);
  make_cublas_handle(gemm, x);
  return run(&gemm, rows, x, layer);
}

Tensor apply_layers(const Tensor& x, const Layer& first, const Layer& second) {
  const TensorRows rows(x);
  FusedGemm gemm(input_of(rows), first, gpu(x.get_device_index()), current_stream(x), false);
  FusedGemm next = gemm.behind(second);
  make_cublas_handle(next, x);
  if (!gemm.fused() || !next.fused()) {
    const Tensor hidden = run(&gemm, rows, x, first);
    return run(&next, TensorRows(hidden), hidden, second);
  }
  constexpr int64_t kElementBytes = 2;  // float32 has no fused GEMM
  const Scratch hidden(rows.rows * first.weight.size(0) * kElementBytes);
  gemm.launch(rows.tensor.const_data_ptr(), hidden.data());
  const Tensor out = new_dense(x, with_last_size(x, second.weight.size(0)));
  next.launch(hidden.data(), out.mutable_data_ptr());
  return out;
}

std::string plan(const Tensor& x, const Tensor& weight, const OptionalTensor& up_weight,
                 const OptionalTensor& second_weight, const OptionalTensor& bias, const OptionalTensor& up_bias,
                 const OptionalTensor& second_bias, int64_t activation) {
  const Layer layer{weight, up_weight ? &*up_weight : nullptr, bias, up_bias, activation};
  const FusedGemm gemm(input_of(TensorRows(x)), layer, gpu(x.get_device_index()), current_stream(x), false);
  PlanRecord plan;
  record(gemm, layer, &plan);
  if (second_weight) {
    const Layer second{*second_weight, nullptr, second_bias, kNoBias, kNoActivation};
    record(gemm.behind(second), second, &plan);
  }
  return plan.text();
}

}  // namespace fused_mlp
