#include "layer.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>

#include <string>

#include "../../torch-ext/operands/operands.h"
#include "../../torch-ext/ops/plan.h"
#include "../../torch-ext/ops/torch_gemm.h"
#include "../device.h"
#include "../gemm/choice/record.h"
#include "fused_gemm.h"
#include "torch/torch_layer.h"

namespace fused_mlp {
namespace {

Input input_of(const TensorRows& x) { return {matrix(x), x.rows, x.cols, dtype_of(x.tensor, "x")}; }

// A layer in the form that the kernels use, or the reason why they cannot read it.
struct Described {
  PlainLayer layer{};
  Refusal refusal;

  explicit Described(const Layer& given) : refusal(describe(given)) {
    layer.out = given.weight.size(0);
    layer.activation = given.activation;
  }

 private:
  Refusal describe(const Layer& given) {
    if (!describe_weight(given.weight, &layer.weight)) return Refusal::kColumnMajorWeight;
    if (given.up_weight != nullptr && !describe_weight(*given.up_weight, &layer.up_weight)) {
      return Refusal::kColumnMajorWeight;
    }
    const bool dense = describe_bias(given.bias, &layer.bias) && describe_bias(given.up_bias, &layer.up_bias);
    return dense ? Refusal::kNone : Refusal::kStridedBias;
  }
};

FusedGemm fused_gemm(const TensorRows& x, const Layer& layer, const Place& place) {
  const Described described(layer);
  const int32_t device = x.tensor.get_device_index();
  return {input_of(x), described.layer, described.refusal, gpu(device), current_stream(device), place};
}

FusedGemm behind(const FusedGemm& gemm, const Layer& layer) {
  const Described described(layer);
  return gemm.behind(described.layer, described.refusal);
}

// A bit for each GPU on which torch has created a cuBLAS handle for this thread.
thread_local uint64_t made_cublas_handles = 0;
uint64_t handle_bit(int32_t device) { return uint64_t{1} << device % 64; }

void make_cublas_handle(const FusedGemm& gemm, const Tensor& like) {
  const int32_t device = like.get_device_index();
  if (!lacks_cublas_handle(gemm, device)) return;
  const std::vector<int64_t> sizes{8, 8};
  const Tensor operand = new_dense(like, sizes), out = new_dense(like, sizes);
  TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_mm_out(out.get(), operand.get(), operand.get()));
  made_cublas_handles |= handle_bit(device);
}

Tensor run(FusedGemm* gemm, const TensorRows& rows, const Tensor& x, const Layer& layer) {
  const auto out_sizes = with_last_size(x, layer.weight.size(0));
  if (!gemm->fused()) {
    return view_of(torch_layer(matrix_view(rows), layer), out_sizes, dense_strides(out_sizes));
  }
  const Tensor out = new_dense(x, out_sizes);
  gemm->launch(rows.tensor.const_data_ptr(), out.mutable_data_ptr());
  return out;
}

// Records how a layer would be computed.
void record(const FusedGemm& gemm, const Layer& layer, PlanRecord* plan) {
  plan->layer();
  if (gemm.fused()) {
    record_kernel(gemm.plan.architecture->name, gemm.plan.kernel, guesses(gemm.plan, gemm.gpu), plan);
    return;
  }
  plan->set("implementation", "torch").set("refusal", code(gemm.refusal));
  if (layer.up_weight == nullptr && layer.activation == kNoActivation) return;
  plan->set("pointwise", torch_has_epilogue(gemm.problem.a, layer) ? "epilogue" : "cuda");
}

}  // namespace

bool lacks_cublas_handle(const FusedGemm& gemm, int32_t device) {
  return gemm.fused() && gemm.launcher != Launcher::kGraph && !(made_cublas_handles & handle_bit(device));
}

Tensor apply_layer(const Tensor& x, const Layer& layer, const Place& place) {
  const TensorRows rows(x);
  FusedGemm gemm = fused_gemm(rows, layer, place);
  make_cublas_handle(gemm, x);
  return run(&gemm, rows, x, layer);
}

Tensor apply_layers(const Tensor& x, const Layer& first, const Layer& second, const Place& place) {
  const TensorRows rows(x);
  FusedGemm gemm = fused_gemm(rows, first, place);
  FusedGemm next = behind(gemm, second);
  make_cublas_handle(gemm, x);
  make_cublas_handle(next, x);
  if (!gemm.fused() || !next.fused()) {
    const Tensor hidden = run(&gemm, rows, x, first);
    return run(&next, TensorRows(hidden), hidden, second);
  }
  const Scratch hidden(rows.rows * first.weight.size(0) * element_bytes(gemm.problem.dtype));
  gemm.launch(rows.tensor.const_data_ptr(), hidden.data());
  const Tensor out = new_dense(x, with_last_size(x, second.weight.size(0)));
  next.launch(hidden.data(), out.mutable_data_ptr());
  return out;
}

std::string plan(const Tensor& x, const Tensor& weight, const OptionalTensor& up_weight,
                 const OptionalTensor& second_weight, const OptionalTensor& bias, const OptionalTensor& up_bias,
                 const OptionalTensor& second_bias, int64_t activation) {
  const Layer layer{weight, up_weight ? &*up_weight : nullptr, bias, up_bias, activation};
  const FusedGemm gemm = fused_gemm(TensorRows(x), layer, {});
  PlanRecord plan;
  record(gemm, layer, &plan);
  if (second_weight) {
    const Layer second{*second_weight, nullptr, second_bias, kNoBias, kNoActivation};
    record(behind(gemm, second), second, &plan);
  }
  return plan.text();
}

}  // namespace fused_mlp
