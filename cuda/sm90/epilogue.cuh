// What happens to accumulators on their way out: bias, activation, gating, rounding. Apart from the main loops.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "../../torch-ext/activation.h"
#include "../activations.cuh"

namespace fused_mlp::sm90 {

struct EpilogueArgs {
  const void* bias;     // of the weight (the gate's where there are two), or null
  const void* up_bias;  // or null
  int64_t activation;
};

__device__ __forceinline__ float2 to_float2(__nv_bfloat162 v) { return __bfloat1622float2(v); }
__device__ __forceinline__ float2 to_float2(__half2 v) { return __half22float2(v); }

template <typename Element>
struct ElementTraits;
template <>
struct ElementTraits<__nv_bfloat16> {
  static constexpr Precision kPrecision = Precision::kBFloat16;
  using Pair = __nv_bfloat162;
  static __device__ __forceinline__ Pair round(float low, float high) { return __floats2bfloat162_rn(low, high); }
};
template <>
struct ElementTraits<__half> {
  static constexpr Precision kPrecision = Precision::kFloat16;
  using Pair = __half2;
  static __device__ __forceinline__ Pair round(float low, float high) { return __floats2half2_rn(low, high); }
};

template <typename Element>
__device__ __forceinline__ uint32_t round_pair(float low, float high) {
  const auto pair = ElementTraits<Element>::round(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Elements `column` and `column + 1` of a bias of n elements, both even. Past the end it returns the last two: such
// columns are never stored.
template <typename Element>
__device__ __forceinline__ typename ElementTraits<Element>::Pair load_bias_pair(const void* bias, int column, int n) {
  using Pair = typename ElementTraits<Element>::Pair;
  return __ldg(reinterpret_cast<const Pair*>(static_cast<const Element*>(bias) + min(column, n - 2)));
}

template <Activation A, typename Element, int kCount>
__device__ __forceinline__ void activate(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] = ActivationFn<A, ElementTraits<Element>::kPrecision>::value(values[i]);
}

}  // namespace fused_mlp::sm90
