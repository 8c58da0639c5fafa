// Elements in memory, and as float, in which the kernels compute.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "../torch-ext/operands/matrix.h"

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

// Elements as they are in memory: 16 bytes in words, or a single one. In this form they use the fewest registers; from
// a Vector, the compiler would extract each 16-bit lane as soon as it is read.
template <typename T, int Width>
struct alignas(sizeof(T) * Width) Packed {
  using Word = std::conditional_t<Width == 1, T, uint32_t>;
  static constexpr int kOfWord = sizeof(Word) / sizeof(T);
  Word words[Width / kOfWord];

  __device__ __forceinline__ float lane(int i) const {
    const Word word = words[i / kOfWord];
    if constexpr (Width == 1) {
      return to_float(word);
    } else if constexpr (std::is_same_v<T, float>) {
      return __uint_as_float(word);
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      return __uint_as_float(i % 2 == 0 ? word << 16 : word & 0xffff0000);
    } else {
      return to_float(__ushort_as_half(static_cast<uint16_t>(word >> i % 2 * 16)));
    }
  }
};

// Two floats as 16-bit elements.
template <typename T>
__device__ __forceinline__ uint32_t round_pair(float low, float high) {
  std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162> pair;
  if constexpr (std::is_same_v<T, __half>) {
    pair = __floats2half2_rn(low, high);
  } else {
    pair = __floats2bfloat162_rn(low, high);
  }
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Rounds the values and stores them. An assignment of 16 bytes may compile to four stores; this is one.
template <typename T, int Width>
__device__ __forceinline__ void store(T* target, const float (&values)[Width]) {
  if constexpr (Width == 1) {
    *target = from_float<T>(values[0]);
  } else {
    static_assert(Width * sizeof(T) == kVectorBytes);
    uint32_t words[kVectorBytes / 4];
#pragma unroll
    for (int i = 0; i < kVectorBytes / 4; ++i) {
      if constexpr (std::is_same_v<T, float>) {
        words[i] = __float_as_uint(values[i]);
      } else {
        words[i] = round_pair<T>(values[2 * i], values[2 * i + 1]);
      }
    }
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                 "r"(words[3])
                 : "memory");
  }
}

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
