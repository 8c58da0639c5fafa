// Elements in memory, and as float, in which the kernels compute.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "../torch-ext/matrix.h"

namespace fused_mlp {

constexpr int kVectorBytes = 16;

template <typename T>
__device__ __forceinline__ float to_float(T x) {
  return static_cast<float>(x);
}

template <typename T>
__device__ __forceinline__ T from_float(float x) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(x);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(x);
  } else {
    return x;
  }
}

template <typename T, int Width>
struct alignas(sizeof(T) * Width) Vector {
  T lane[Width];
};

// Calls visit with a null pointer of the element type.
template <typename Visitor>
cudaError_t visit_dtype(DType dtype, Visitor&& visit) {
  switch (dtype) {
    case DType::kFloat32:
      return visit(static_cast<float*>(nullptr));
    case DType::kFloat16:
      return visit(static_cast<__half*>(nullptr));
    case DType::kBFloat16:
      return visit(static_cast<__nv_bfloat16*>(nullptr));
  }
  return cudaErrorInvalidValue;
}

}  // namespace fused_mlp
