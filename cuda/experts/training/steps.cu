// Launches the steps of training between the products of experts.
#include "expert_sums.cuh"
#include "gates.cuh"

namespace fused_mlp {

cudaError_t launch_expert_gates(const ExpertGates& gates, int64_t rows, cudaStream_t stream) {
  auto* kernel = gates.dtype == DType::kFloat16 ? expert_gates_kernel<__half> : expert_gates_kernel<__nv_bfloat16>;
  kernel<<<static_cast<unsigned>(rows), kGateThreads, 0, stream>>>(gates);
  return cudaGetLastError();
}

cudaError_t launch_expert_gate_gradients(const ExpertGateGradients& gradients, int64_t rows, cudaStream_t stream) {
  auto* kernel = gradients.gates.dtype == DType::kFloat16 ? expert_gate_gradients_kernel<__half>
                                                          : expert_gate_gradients_kernel<__nv_bfloat16>;
  kernel<<<static_cast<unsigned>(rows), kGateThreads, 0, stream>>>(gradients);
  return cudaGetLastError();
}

cudaError_t launch_expert_sums(const ExpertSums& sums, cudaStream_t stream) {
  auto* kernel = sums.dtype == DType::kFloat16 ? expert_sums_kernel<__half> : expert_sums_kernel<__nv_bfloat16>;
  const dim3 grid(static_cast<unsigned>(ceil_div(sums.columns, kExpertSumColumns)),
                  static_cast<unsigned>(sums.experts));
  kernel<<<grid, kExpertSumThreads, 0, stream>>>(sums);
  return cudaGetLastError();
}

}  // namespace fused_mlp
