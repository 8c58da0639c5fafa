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

// The operand of a layer: rows of k elements. The plan of a second layer is made before its operand is there: its data
// is null then.
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

  bool fused() const { return refusal == Refusal::kNone; }
  void launch_into(void* out) {
    problem.out.data = out;
    check(plan.architecture->launch(problem, plan, gpu, stream));
  }

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

// Has torch make the cuBLAS handle that a thread's first product on a GPU needs: it cannot be made while a stream is
// captured, and the product that a graph leaves to torch may be ours in all calls before.
void make_cublas_handle(const Tensor& like) {
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
  if (gemm->launched_behind) make_cublas_handle(x);
  const Tensor out = new_dense(x, out_sizes);
  gemm->launch_into(out.mutable_data_ptr());
  return out;
}

// Writes down how apply_layer() would compute a layer.
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

Tensor apply_layer(const Tensor& x, const Layer& layer, bool* fused) {
  const TensorRows rows(x);
  FusedGemm gemm(input_of(rows), layer, gpu(x.get_device_index()), current_stream(x), *fused);
  *fused = gemm.fused();
  return run(&gemm, rows, x, layer);
}

Tensor apply_layers(const Tensor& x, const Layer& first, const Layer& second) {
  const TensorRows rows(x);
  const Gpu& device = gpu(x.get_device_index());
  cudaStream_t const stream = current_stream(x);
  const Input input = input_of(rows);
  FusedGemm gemm(input, first, device, stream, false);
  if (gemm.fused()) {
    const int64_t features = first.weight.size(0);
    FusedGemm next({{nullptr, features}, rows.rows, features, input.dtype}, second, device, stream, true);
    if (next.fused()) {
      constexpr int64_t kElementBytes = 2;  // float32 has no fused GEMM
      const Scratch hidden(rows.rows * features * kElementBytes);
      gemm.launch_into(hidden.data());
      next.problem.a.data = hidden.data();
      return run(&next, rows, x, second);
    }
  }
  bool fused = gemm.fused();
  return apply_layer(run(&gemm, rows, x, first), second, &fused);
}

std::string plan(const Tensor& x, const Tensor& weight, const OptionalTensor& up_weight,
                 const OptionalTensor& second_weight, const OptionalTensor& bias, const OptionalTensor& up_bias,
                 const OptionalTensor& second_bias, int64_t activation) {
  const Gpu& device = gpu(x.get_device_index());
  const Layer layer{weight, up_weight ? &*up_weight : nullptr, bias, up_bias, activation};
  const TensorRows rows(x);
  const Input input = input_of(rows);
  cudaStream_t const stream = current_stream(x);
  const FusedGemm gemm(input, layer, device, stream, false);
  PlanRecord plan;
  record(gemm, layer, &plan);
  if (second_weight) {
    const int64_t features = weight.size(0);
    const Layer second{*second_weight, nullptr, second_bias, kNoBias, kNoActivation};
    record(FusedGemm({{nullptr, features}, input.rows, features, input.dtype}, second, device, stream, gemm.fused()),
           second, &plan);
  }
  return plan.text();
}

}  // namespace fused_mlp
