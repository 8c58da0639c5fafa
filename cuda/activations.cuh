#pragma once

#include "../torch-ext/activation.h"

namespace fused_mlp {

// Formulas and derivatives in fp32, one specialisation per activation.
//
// `Fast` takes the hardware's approximations (relative error about 1e-6): far inside the rounding of fp16 and bf16
// results, not of fp32 ones. tanh never appears: 0.5 (1 + tanh u) = sigmoid(2u), which does not cancel at u << 0.
template <bool Fast>
__device__ __forceinline__ float sigmoid(float x) {
  if constexpr (Fast) {
    return __fdividef(1.0f, 1.0f + __expf(-x));
  } else {
    return 1.0f / (1.0f + expf(-x));
  }
}

template <bool Fast>
__device__ __forceinline__ float normal_cdf(float x) {
  constexpr float kSqrtHalf = 0.70710678118654752f;
  if constexpr (Fast) {
    return 0.5f + 0.5f * erff(x * kSqrtHalf);
  } else {
    return normcdff(x);
  }
}

__device__ __forceinline__ float normal_pdf(float x) {
  constexpr float kInvSqrt2Pi = 0.39894228040143268f;
  return kInvSqrt2Pi * expf(-0.5f * x * x);
}

template <Activation A, bool Fast>
struct ActivationFn;

template <bool Fast>
struct ActivationFn<Activation::kLinear, Fast> {
  static __device__ __forceinline__ float value(float x) { return x; }
  static __device__ __forceinline__ float derivative(float) { return 1.0f; }
};

template <bool Fast>
struct ActivationFn<Activation::kGelu, Fast> {
  static __device__ __forceinline__ float value(float x) { return x * normal_cdf<Fast>(x); }
  static __device__ __forceinline__ float derivative(float x) { return normal_cdf<Fast>(x) + x * normal_pdf(x); }
};

template <bool Fast>
struct ActivationFn<Activation::kGeluTanh, Fast> {
  static constexpr float kTwoSqrt2OverPi = 1.59576912160573071f;
  static constexpr float kCubic = 0.044715f;
  static __device__ __forceinline__ float weight(float x) {
    return sigmoid<Fast>(kTwoSqrt2OverPi * x * (1.0f + kCubic * x * x));
  }
  static __device__ __forceinline__ float value(float x) { return x * weight(x); }
  static __device__ __forceinline__ float derivative(float x) {
    const float s = weight(x);
    return s + x * s * (1.0f - s) * kTwoSqrt2OverPi * (1.0f + 3.0f * kCubic * x * x);
  }
};

template <bool Fast>
struct ActivationFn<Activation::kQuickGelu, Fast> {
  static constexpr float kSlope = 1.702f;
  static __device__ __forceinline__ float value(float x) { return x * sigmoid<Fast>(kSlope * x); }
  static __device__ __forceinline__ float derivative(float x) {
    const float s = sigmoid<Fast>(kSlope * x);
    return s + kSlope * x * s * (1.0f - s);
  }
};

template <bool Fast>
struct ActivationFn<Activation::kSilu, Fast> {
  static __device__ __forceinline__ float value(float x) { return x * sigmoid<Fast>(x); }
  static __device__ __forceinline__ float derivative(float x) {
    const float s = sigmoid<Fast>(x);
    return s + x * s * (1.0f - s);
  }
};

// `x <= 0 ? 0 : x` rather than fmaxf: NaN passes through, as in torch.
template <bool Fast>
struct ActivationFn<Activation::kRelu, Fast> {
  static __device__ __forceinline__ float value(float x) { return x <= 0.0f ? 0.0f : x; }
  static __device__ __forceinline__ float derivative(float x) { return x <= 0.0f ? 0.0f : 1.0f; }
};

template <bool Fast>
struct ActivationFn<Activation::kRelu2, Fast> {
  static __device__ __forceinline__ float value(float x) { return x <= 0.0f ? 0.0f : x * x; }
  static __device__ __forceinline__ float derivative(float x) { return x <= 0.0f ? 0.0f : 2.0f * x; }
};

template <bool Fast>
struct ActivationFn<Activation::kSigmoid, Fast> {
  static __device__ __forceinline__ float value(float x) { return sigmoid<Fast>(x); }
  static __device__ __forceinline__ float derivative(float x) {
    const float s = sigmoid<Fast>(x);
    return s * (1.0f - s);
  }
};

}  // namespace fused_mlp
