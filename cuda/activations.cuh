#pragma once

#include "../torch-ext/activation.h"

namespace fused_mlp {

// Formulas and derivatives in fp32, one specialisation per activation. tanh never appears: 0.5 (1 + tanh u) =
// sigmoid(2u), which does not cancel at u << 0; nor is 1 - sigmoid(x) taken, but sigmoid(-x).
//
// `Fast` is for fp16 and bf16 results: the hardware's approximations (relative error about 1e-6), and for the erf form
// of gelu a short fit, whose error is below theirs too.
constexpr float kLog2E = 1.44269504088896341f;

// 1 / (1 + 2^-x), from two instructions of the special function unit.
__device__ __forceinline__ float fast_sigmoid_base2(float x) {
  float power, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-x));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + power));
  return inverse;
}

template <bool Fast>
__device__ __forceinline__ float sigmoid(float x) {
  if constexpr (Fast) {
    return fast_sigmoid_base2(kLog2E * x);
  } else {
    return 1.0f / (1.0f + expf(-x));
  }
}

template <bool Fast>
__device__ __forceinline__ float normal_cdf(float x) {
  if constexpr (Fast) {
    // sigmoid(x p(x^2)), p a minimax fit to logit(cdf(x)) / x on |x| < 5: the relative error of the cdf is under 2e-4
    // (at x < 0; at x > 0 that of one minus the cdf).
    const float t = fminf(x * x, 25.0f);
    float p = -3.6794857e-8f * kLog2E;
    p = fmaf(p, t, 2.3637104e-6f * kLog2E);
    p = fmaf(p, t, -4.6162213e-5f * kLog2E);
    p = fmaf(p, t, -4.2516765e-4f * kLog2E);
    p = fmaf(p, t, 7.3523976e-2f * kLog2E);
    p = fmaf(p, t, 1.5951872f * kLog2E);
    return fast_sigmoid_base2(x * p);
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
    if constexpr (Fast) {
      constexpr float kSlope = kTwoSqrt2OverPi * kLog2E;
      return fast_sigmoid_base2(x * fmaf(kSlope * kCubic, x * x, kSlope));
    } else {
      return sigmoid<false>(kTwoSqrt2OverPi * x * (1.0f + kCubic * x * x));
    }
  }
  static __device__ __forceinline__ float value(float x) { return x * weight(x); }
  static __device__ __forceinline__ float derivative(float x) {
    const float s = weight(x);
    return s + x * s * weight(-x) * kTwoSqrt2OverPi * (1.0f + 3.0f * kCubic * x * x);
  }
};

template <bool Fast>
struct ActivationFn<Activation::kQuickGelu, Fast> {
  static constexpr float kSlope = 1.702f;
  static __device__ __forceinline__ float value(float x) { return x * sigmoid<Fast>(kSlope * x); }
  static __device__ __forceinline__ float derivative(float x) {
    const float s = sigmoid<Fast>(kSlope * x);
    return s + kSlope * x * s * sigmoid<Fast>(-kSlope * x);
  }
};

template <bool Fast>
struct ActivationFn<Activation::kSilu, Fast> {
  static __device__ __forceinline__ float value(float x) { return x * sigmoid<Fast>(x); }
  static __device__ __forceinline__ float derivative(float x) {
    const float s = sigmoid<Fast>(x);
    return s + x * s * sigmoid<Fast>(-x);
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
  static __device__ __forceinline__ float derivative(float x) { return sigmoid<Fast>(x) * sigmoid<Fast>(-x); }
};

}  // namespace fused_mlp
