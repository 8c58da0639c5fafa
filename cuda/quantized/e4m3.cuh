// Rounding to e4m3.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

namespace fused_mlp {

// The scale of values that are rounded together as x / scale. It is never so small that its inverse is infinite.
__device__ __forceinline__ float e4m3_scale(float largest) { return fmaxf(__fdiv_rn(largest, 448.0f), 1e-36f); }

__device__ __forceinline__ uint32_t e4m3_pair(float low, float high) {
  return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
}

}  // namespace fused_mlp
