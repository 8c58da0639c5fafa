// The gradients of the weights in a mixture's weighted sum.
#pragma once

#include "routes.cuh"

namespace fused_mlp {

constexpr int kWeightGradientThreads = 256;

// One warp per slot: its lanes add the partial sums of the slot's row, and then their sums, in a fixed order.
__global__ void __launch_bounds__(kWeightGradientThreads)
    weight_gradient_kernel(const __grid_constant__ WeightGradient args) {
  const int slot = static_cast<int>(blockIdx.x * (kWeightGradientThreads / 32) + threadIdx.x / 32);
  if (slot >= args.routes.slots()) return;
  const int row = expert_of(args.routes, slot) < 0 ? -1 : __ldg(args.row_of_slot + slot);
  const int lane = threadIdx.x % 32;
  float sum = 0.0f;
  if (row >= 0) {
    for (int part = lane; part < args.parts; part += 32) sum += __ldg(args.row_sums + int64_t{row} * args.parts + part);
  }
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) sum += __shfl_xor_sync(0xFFFFFFFF, sum, distance);
  if (lane != 0) return;
  switch (args.type) {
    case WeightType::kFloat32:
      static_cast<float*>(args.out)[slot] = sum;
      break;
    case WeightType::kFloat64:
      static_cast<double*>(args.out)[slot] = sum;
      break;
    case WeightType::kFloat16:
      static_cast<__half*>(args.out)[slot] = __float2half_rn(sum);
      break;
    case WeightType::kBFloat16:
      static_cast<__nv_bfloat16*>(args.out)[slot] = __float2bfloat16_rn(sum);
      break;
  }
}

}  // namespace fused_mlp
