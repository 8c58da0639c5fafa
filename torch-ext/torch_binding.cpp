#include "torch_binding.h"

#include <torch/csrc/stable/library.h>

#include <string>

#include "calls/direct/gradients.h"
#include "calls/direct/ops.h"
#include "calls/plain_modules.h"
#include "registration.h"

// kernel-builder leaves out the sources of all backends except the one that it finds: on a Mac with a GPU, Metal.
#if !defined(CPU_KERNEL) && !defined(CUDA_KERNEL)
#error "there are ops for CPUs and for CUDA alone: on a Mac, build in Nix's sandbox (sandbox = relaxed)"
#endif

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def("act_and_mul(Tensor gate, Tensor up, int activation) -> Tensor");
  ops.def("act_and_mul_backward(Tensor grad, Tensor gate, Tensor up, int activation) -> (Tensor, Tensor)");
  ops.def("mm(Tensor a, Tensor b) -> Tensor");
  ops.def("linear(Tensor x, Tensor weight, Tensor? bias, int activation) -> Tensor");
  ops.def(
      "gated_linear(Tensor x, Tensor gate_weight, Tensor up_weight, Tensor? gate_bias, Tensor? up_bias, "
      "int activation) -> Tensor");
  ops.def(
      "plan(Tensor x, Tensor weight, Tensor? up_weight, Tensor? second_weight, Tensor? bias, Tensor? up_bias, "
      "Tensor? second_bias, int activation) -> str");
  ops.def(
      "gated_mlp(Tensor x, Tensor gate_weight, Tensor up_weight, Tensor down_weight, Tensor? gate_bias, "
      "Tensor? up_bias, Tensor? down_bias, int activation) -> Tensor");
  ops.def(
      "mlp(Tensor x, Tensor fc1_weight, Tensor fc2_weight, Tensor? fc1_bias, Tensor? fc2_bias, "
      "int activation) -> Tensor");
  ops.def(
      "residual_mlp(Tensor x, Tensor? fc1_weight, Tensor fc2_weight, Tensor? fc1_bias, Tensor? fc2_bias, "
      "int activation, Tensor residual, float factor, Tensor? first_weight, Tensor? first_bias, float first_eps, "
      "int first_norm, Tensor? last_weight, Tensor? last_bias, float last_eps, int last_norm, bool norms_sum) -> "
      "Tensor");
  ops.def(
      "residual_gated_mlp(Tensor x, Tensor gate_weight, Tensor up_weight, Tensor down_weight, Tensor? gate_bias, "
      "Tensor? up_bias, Tensor? down_bias, int activation, Tensor residual, float factor, Tensor? first_weight, "
      "Tensor? first_bias, float first_eps, int first_norm, Tensor? last_weight, Tensor? last_bias, float last_eps, "
      "int last_norm, bool norms_sum) -> Tensor");
  ops.def(
      "norm_forward(Tensor x, Tensor? weight, Tensor? bias, float eps, int norm, bool rounded) -> (Tensor, Tensor)");
  ops.def(
      "sum_norm_forward(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps, int norm, float dropout) "
      "-> "
      "Tensor[]");
  ops.def(
      "norm_backward(Tensor grad, Tensor x, Tensor? weight, Tensor statistics, Tensor? residual_grad, Tensor? kept, "
      "float dropout, int norm, int needs) -> Tensor[]");
  ops.def(
      "projections_forward(Tensor x, Tensor first_weight, Tensor? second_weight, Tensor? third_weight, "
      "Tensor? first_bias, Tensor? second_bias, Tensor? third_bias) -> Tensor[]");
  ops.def(
      "projections_backward(Tensor? first_grad, Tensor? second_grad, Tensor? third_grad, Tensor? x, "
      "Tensor? first_weight, Tensor? second_weight, Tensor? third_weight, int needs) -> Tensor[]");
  ops.def("rotary(Tensor q, Tensor k, Tensor cos, Tensor sin, bool inverse) -> (Tensor, Tensor)");
  ops.def(
      "experts_mlp(Tensor x, Tensor top_k_index, Tensor top_k_weights, Tensor gate_up_weight, Tensor down_weight, "
      "Tensor? gate_up_bias, Tensor? down_bias, int activation, bool gated, bool interleaved, bool transposed, "
      "float? limit, float up_offset) -> Tensor");
  ops.def(
      "adapted_experts(Tensor x, Tensor top_k_index, Tensor top_k_weights, Tensor gate_up_weight, Tensor down_weight, "
      "Tensor? gate_up_bias, Tensor? down_bias, Tensor?[] factors, float[] scalings, int activation, bool gated, bool "
      "interleaved, "
      "bool transposed, float? limit, float up_offset) -> Tensor");
  ops.def(
      "quantized_experts(Tensor x, Tensor top_k_index, Tensor top_k_weights, Tensor gate_up, Tensor gate_up_scales, "
      "Tensor down, Tensor down_scales, int[] layouts, Tensor? gate_up_bias, Tensor? down_bias, int activation, "
      "bool gated, bool interleaved, float? limit, float up_offset, bool many_rows) -> Tensor");
  ops.def("decoded_experts(Tensor data, Tensor scales, int[] layout, ScalarType dtype) -> Tensor");
  ops.def("plan_quantized_experts(Tensor x, int top_k, int experts, bool fp8, bool many_rows) -> str");
  ops.def(
      "plan_experts(Tensor x, Tensor gate_up_weight, Tensor down_weight, int top_k, bool transposed, bool "
      "trained) -> str");
  ops.def("top_k_router(Tensor x, Tensor weight, int top_k, bool normalized, bool narrow) -> (Tensor, Tensor, Tensor)");
  ops.def(
      "sigmoid_router(Tensor x, Tensor weight, Tensor bias, int top_k, int groups, int top_groups, bool normalized, "
      "float scaling) -> (Tensor, Tensor, Tensor)");
  ops.def(
      "experts_training_forward(Tensor x, Tensor top_k_index, Tensor top_k_weights, Tensor gate_up_weight, "
      "Tensor down_weight, Tensor? gate_up_bias, Tensor? down_bias, Tensor?[] factors, float[] scalings, "
      "int activation, bool gated, bool interleaved, bool transposed, float? limit, float up_offset, "
      "bool keeps_sorted) -> Tensor[]");
  ops.def(
      "experts_training_backward(Tensor grad, Tensor? sorted, Tensor gate_up, Tensor top_k_index, Tensor "
      "top_k_weights, "
      "Tensor gate_up_weight, Tensor down_weight, Tensor? gate_up_bias, Tensor? down_bias, Tensor?[] factors, "
      "float[] scalings, Tensor? rank_rows, int activation, bool gated, bool interleaved, bool transposed, "
      "float? limit, float up_offset, int needs) -> Tensor[]");
  ops.def(
      "experts_training_backward_(Tensor grad, Tensor? sorted, Tensor(a!) gate_up, Tensor top_k_index, Tensor "
      "top_k_weights, Tensor gate_up_weight, Tensor down_weight, Tensor? gate_up_bias, Tensor? down_bias, "
      "Tensor?[] factors, float[] scalings, Tensor? rank_rows, int activation, bool gated, bool interleaved, "
      "bool transposed, float? limit, float up_offset, int needs) -> Tensor[]");
  for (const char* name : {"training_forward", "graph_training_forward"}) {
    ops.def((std::string(name) +
             "(Tensor x, Tensor weight, Tensor? up_weight, Tensor? second_weight, Tensor? bias, Tensor? up_bias, "
             "Tensor? second_bias, int activation, bool keep, bool? up_first) -> (Tensor, Tensor, Tensor)")
                .c_str());
  }
  ops.def(
      "plan_training(Tensor x, Tensor weight, Tensor? up_weight, Tensor? second_weight, Tensor? bias, "
      "Tensor? up_bias, int activation, bool keep) -> str");
  ops.def("least_recorded(Tensor x) -> int");
  ops.def(
      "training_backward(Tensor grad, Tensor? x, Tensor? weight, Tensor? up_weight, Tensor? second_weight, "
      "Tensor? bias, Tensor? up_bias, Tensor? gate, Tensor? up, int activation, int needs, bool? up_first) -> "
      "Tensor[]");
  ops.def(
      "training_backward_(Tensor grad, Tensor? x, Tensor? weight, Tensor? up_weight, Tensor? second_weight, "
      "Tensor? bias, Tensor? up_bias, Tensor(a!) gate, Tensor(b!)? up, int activation, int needs, bool? up_first) "
      "-> Tensor[]");
  ops.def(
      "adapted_forward(Tensor x, Tensor[] weights, Tensor?[] biases, Tensor?[] a, Tensor?[] b, float[] scalings, "
      "float[] dropouts, bool wide_dropout, bool up_drops_first, int[] drawn, bool gated, int activation, int keep) -> "
      "Tensor[]");
  ops.def(
      "adapted_backward(Tensor grad, Tensor? x, Tensor[] weights, Tensor?[] biases, Tensor?[] a, Tensor?[] b, "
      "float[] scalings, float[] dropouts, Tensor?[] masks, Tensor? gate, Tensor? up, Tensor? first_rows, "
      "Tensor? second_rows, bool gated, int activation, int needs) -> Tensor[]");
  ops.def("quantized_decode(Tensor?[] weight, int[] layout, float offset, ScalarType dtype) -> Tensor");
  ops.def(
      "quantized_linear(Tensor x, Tensor?[] weight, int[] layout, float offset, Tensor? bias, int activation) -> "
      "Tensor");
  ops.def(
      "quantized_mlp(Tensor x, Tensor?[] weights, int[] layouts, float[] offsets, Tensor?[] biases, int activation, "
      "bool gated) -> Tensor");
  ops.def(
      "plan_quantized(Tensor x, Tensor?[] weights, int[] layouts, Tensor?[] biases, int activation, bool gated) -> "
      "str");
}

#if defined(CUDA_KERNEL)
#define FUSED_MLP_DISPATCH_KEY CUDA
#elif defined(CPU_KERNEL)
#define FUSED_MLP_DISPATCH_KEY CPU
#else
#error "define CUDA_KERNEL or CPU_KERNEL"
#endif

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, FUSED_MLP_DISPATCH_KEY, ops) {
  ops.impl("act_and_mul", TORCH_BOX(&fused_mlp::act_and_mul));
  ops.impl("act_and_mul_backward", TORCH_BOX(&fused_mlp::act_and_mul_backward));
  ops.impl("mm", TORCH_BOX(&fused_mlp::mm));
  ops.impl("linear", TORCH_BOX(&fused_mlp::linear));
  ops.impl("gated_linear", TORCH_BOX(&fused_mlp::gated_linear));
  ops.impl("plan", TORCH_BOX(&fused_mlp::plan));
  ops.impl("gated_mlp", TORCH_BOX(&fused_mlp::gated_mlp));
  ops.impl("mlp", TORCH_BOX(&fused_mlp::mlp));
  ops.impl("residual_mlp", TORCH_BOX(&fused_mlp::residual_mlp));
  ops.impl("residual_gated_mlp", TORCH_BOX(&fused_mlp::residual_gated_mlp));
  ops.impl("norm_forward", TORCH_BOX(&fused_mlp::norm_forward));
  ops.impl("sum_norm_forward", TORCH_BOX(&fused_mlp::sum_norm_forward));
  ops.impl("norm_backward", TORCH_BOX(&fused_mlp::norm_backward));
  ops.impl("projections_forward", TORCH_BOX(&fused_mlp::projections_forward));
  ops.impl("projections_backward", TORCH_BOX(&fused_mlp::projections_backward));
  ops.impl("rotary", TORCH_BOX(&fused_mlp::rotary));
  ops.impl("experts_mlp", TORCH_BOX(&fused_mlp::experts_mlp));
  ops.impl("plan_experts", TORCH_BOX(&fused_mlp::plan_experts));
  ops.impl("top_k_router", TORCH_BOX(&fused_mlp::top_k_router));
  ops.impl("training_forward", TORCH_BOX(&fused_mlp::training_forward));
  ops.impl("graph_training_forward", TORCH_BOX(&fused_mlp::training_forward));
  ops.impl("plan_training", TORCH_BOX(&fused_mlp::plan_training));
#if defined(CUDA_KERNEL)
  ops.impl("sigmoid_router", TORCH_BOX(&fused_mlp::sigmoid_router));
  ops.impl("adapted_experts", TORCH_BOX(&fused_mlp::adapted_experts));
  ops.impl("quantized_experts", TORCH_BOX(&fused_mlp::quantized_experts));
  ops.impl("decoded_experts", TORCH_BOX(&fused_mlp::decoded_experts));
  ops.impl("plan_quantized_experts", TORCH_BOX(&fused_mlp::plan_quantized_experts));
  ops.impl("experts_training_forward", TORCH_BOX(&fused_mlp::experts_training_forward));
  ops.impl("experts_training_backward", TORCH_BOX(&fused_mlp::experts_training_backward));
  ops.impl("experts_training_backward_", TORCH_BOX(&fused_mlp::experts_training_backward_));
#else
  ops.impl("least_recorded", TORCH_BOX(&fused_mlp::least_recorded));
#endif
  ops.impl("training_backward", TORCH_BOX(&fused_mlp::training_backward));
  ops.impl("training_backward_", TORCH_BOX(&fused_mlp::training_backward_));
  ops.impl("adapted_forward", TORCH_BOX(&fused_mlp::adapted_forward));
  ops.impl("adapted_backward", TORCH_BOX(&fused_mlp::adapted_backward));
  ops.impl("quantized_decode", TORCH_BOX(&fused_mlp::quantized_decode));
  ops.impl("quantized_linear", TORCH_BOX(&fused_mlp::quantized_linear));
  ops.impl("quantized_mlp", TORCH_BOX(&fused_mlp::quantized_mlp));
  ops.impl("plan_quantized", TORCH_BOX(&fused_mlp::plan_quantized));
}

#define FUSED_MLP_JOINED(a, b) a##b
#define FUSED_MLP_INIT(name) FUSED_MLP_JOINED(PyInit_, name)
#define FUSED_MLP_QUOTED(name) #name
#define FUSED_MLP_TEXT(name) FUSED_MLP_QUOTED(name)

// Importing the module loads the library, whose static initialisers register the ops. kernel-builder's own macro would
// create a module without functions.
PyMODINIT_FUNC FUSED_MLP_INIT(TORCH_EXTENSION_NAME)() {
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                                   FUSED_MLP_TEXT(TORCH_EXTENSION_NAME),
                                   nullptr,
                                   0,
                                   fused_mlp::plain_module_methods,
                                   nullptr,
                                   nullptr,
                                   nullptr,
                                   nullptr};
  PyObject* const module = PyModule_Create(&definition);
  for (PyMethodDef* more : {fused_mlp::direct_op_methods, fused_mlp::gradient_methods}) {
    if (module != nullptr && PyModule_AddFunctions(module, more) != 0) return nullptr;
  }
  return module;
}
