// How the kernels read which token chose which expert.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../../gemm/grouped.h"

namespace fused_mlp {

// Calls visit with the index as a pointer to its integer type.
template <typename Visit>
__device__ __forceinline__ void visit_index(const Routes& routes, Visit&& visit) {
  switch (routes.index_bytes) {
    case 8:
      return visit(static_cast<const long long*>(routes.index));
    case 4:
      return visit(static_cast<const int*>(routes.index));
    case 2:
      return visit(static_cast<const short*>(routes.index));
    default:
      return visit(static_cast<const signed char*>(routes.index));
  }
}

// The expert that an integer of the index names; -1 if it is skipped.
__device__ __forceinline__ int expert_named(const Routes& routes, int64_t number) {
  return 0 <= number && number < routes.experts ? static_cast<int>(number) : -1;
}

// The expert of a slot; -1 if it is skipped.
__device__ __forceinline__ int expert_of(const Routes& routes, int slot) {
  int64_t number = -1;
  visit_index(routes, [&](const auto* index) { number = __ldg(index + slot); });
  return expert_named(routes, number);
}

// The weight of a slot.
__device__ __forceinline__ float weight_of(const void* weights, WeightType type, int slot) {
  switch (type) {
    case WeightType::kFloat32:
      return __ldg(static_cast<const float*>(weights) + slot);
    case WeightType::kFloat64:
      return static_cast<float>(__ldg(static_cast<const double*>(weights) + slot));
    case WeightType::kFloat16:
      return static_cast<float>(__ldg(static_cast<const __half*>(weights) + slot));
    default:
      return static_cast<float>(__ldg(static_cast<const __nv_bfloat16*>(weights) + slot));
  }
}

// The prefix sum of a warp's values, up to and including this lane's.
__device__ __forceinline__ int sum_of_lanes(int value) {
  for (int distance = 1; distance < 32; distance *= 2) {
    const int others = __shfl_up_sync(0xFFFFFFFF, value, distance);
    if (static_cast<int>(threadIdx.x % 32) >= distance) value += others;
  }
  return value;
}

}  // namespace fused_mlp
