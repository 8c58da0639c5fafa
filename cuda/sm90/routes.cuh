// How the kernels read who chose which expert.
#pragma once

#include "../gemm/grouped.h"

namespace fused_mlp::sm90 {

// The expert of a slot; -1 where it is skipped.
__device__ __forceinline__ int expert_of(const Routes& routes, int slot) {
  const auto at = [&](auto* index) -> int64_t { return __ldg(index + slot); };
  const int64_t expert = routes.index_bytes == 8   ? at(static_cast<const long long*>(routes.index))
                         : routes.index_bytes == 4 ? at(static_cast<const int*>(routes.index))
                         : routes.index_bytes == 2 ? at(static_cast<const short*>(routes.index))
                                                   : at(static_cast<const signed char*>(routes.index));
  return 0 <= expert && expert < routes.experts ? static_cast<int>(expert) : -1;
}

// The sum of a warp's values up to this lane's.
__device__ __forceinline__ int sum_of_lanes(int value) {
  for (int distance = 1; distance < 32; distance *= 2) {
    const int others = __shfl_up_sync(0xFFFFFFFF, value, distance);
    if (static_cast<int>(threadIdx.x % 32) >= distance) value += others;
  }
  return value;
}

}  // namespace fused_mlp::sm90
