#pragma once

#include "../torch-ext/operands/activation.h"

namespace fused_mlp {

// Formulas and derivatives in fp32, one specialisation per activation. Neither tanh nor 1 - sigmoid(x) is computed in
// full precision, because both cancel: 0.5 (1 + tanh u) is sigmoid(2u), and 1 - sigmoid(x) is sigmoid(-x).

// The dtype of the result. Below kFloat32 the hardware's approximations suffice (relative error about 1e-6). For the
// erf form of gelu a fit suffices, whose error is below the result's rounding except far out at x < 0.
enum class Precision { kFloat32, kFloat16, kBFloat16 };

constexpr float kLog2E = 1.44269504088896341f;

// 1 / (1 + 2^-x), from two instructions of the special function unit.
__device__ __forceinline__ float fast_sigmoid_base2(float x) {
  float power, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-x));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + power));
  return inverse;
}

template <Precision P>
__device__ __forceinline__ float sigmoid(float x) {
  if constexpr (P == Precision::kFloat32) {
    return 1.0f / (1.0f + expf(-x));
  } else {
    return fast_sigmoid_base2(kLog2E * x);
  }
}

// sigmoid(-x), from x and sigmoid(x). Below kFloat32 the difference from 1 suffices: where it cancels, at x >> 0, a
// derivative is 1 except for x times its error, about 1e-6.
template <Precision P>
__device__ __forceinline__ float sigmoid_of_negative(float x, float sigmoid_of_x) {
  if constexpr (P == Precision::kFloat32) {
    return sigmoid<P>(-x);
  } else {
    return 1.0f - sigmoid_of_x;
  }
}

// sigmoid(x p(x^2)), where p is a fit to logit(cdf(x)) / x. The relative errors below are those of the cdf at x < 0,
// and of one minus the cdf at x > 0.
template <Precision P>
__device__ __forceinline__ float normal_cdf(float x) {
  if constexpr (P == Precision::kFloat32) {
    return normcdff(x);
  } else if constexpr (P == Precision::kFloat16) {  // 2e-4 down to -4.2, 1.4e-2 at -5; gelu is within 2.3e-5
    const float t = fminf(x * x, 25.0f);
    float p = -3.6794857e-8f * kLog2E;
    p = fmaf(p, t, 2.3637104e-6f * kLog2E);
    p = fmaf(p, t, -4.6162213e-5f * kLog2E);
    p = fmaf(p, t, -4.2516765e-4f * kLog2E);
    p = fmaf(p, t, 7.3523976e-2f * kLog2E);
    p = fmaf(p, t, 1.5951872f * kLog2E);
    return fast_sigmoid_base2(x * p);
  } else {  // 1.3e-3 down to -5; gelu is within 1.7e-4. p grows with t: x needs no limit
    const float t = x * x;
    float p = 9.0331374e-6f * kLog2E;
    p = fmaf(p, t, -9.8673564e-4f * kLog2E);
    p = fmaf(p, t, 7.5828059e-2f * kLog2E);
    p = fmaf(p, t, 1.5926073f * kLog2E);
    return fast_sigmoid_base2(x * p);
  }
}

__device__ __forceinline__ float normal_pdf(float x) {
  constexpr float kInvSqrt2Pi = 0.39894228040143268f;
  return kInvSqrt2Pi * expf(-0.5f * x * x);
}

template <Activation A, Precision P>
struct ActivationFn;

template <Precision P>
struct ActivationFn<Activation::kLinear, P> {
  static __device__ __forceinline__ float value(float x) { return x; }
  static __device__ __forceinline__ float derivative(float) { return 1.0f; }
};

template <Precision P>
struct ActivationFn<Activation::kGelu, P> {
  static __device__ __forceinline__ float value(float x) { return x * normal_cdf<P>(x); }
  static __device__ __forceinline__ float derivative(float x) { return normal_cdf<P>(x) + x * normal_pdf(x); }
};

template <Precision P>
struct ActivationFn<Activation::kGeluTanh, P> {
  static constexpr float kTwoSqrt2OverPi = 1.59576912160573071f;
  static constexpr float kCubic = 0.044715f;
  static __device__ __forceinline__ float weight(float x) {
    if constexpr (P == Precision::kFloat32) {
      return sigmoid<P>(kTwoSqrt2OverPi * x * (1.0f + kCubic * x * x));
    } else {
      constexpr float kSlope = kTwoSqrt2OverPi * kLog2E;
      return fast_sigmoid_base2(x * fmaf(kSlope * kCubic, x * x, kSlope));
    }
  }
  static __device__ __forceinline__ float value(float x) { return x * weight(x); }
  static __device__ __forceinline__ float derivative(float x) {
    // The result is 0 or 1 to the last bit well inside these bounds; outside them x * x may overflow. NaN at infinity.
    const float bounded = fminf(fmaxf(x, -32.0f), 32.0f) + (x - x);
    const float s = weight(bounded);
    const float of_negative = P == Precision::kFloat32 ? weight(-bounded) : 1.0f - s;
    return s + bounded * s * of_negative * kTwoSqrt2OverPi * (1.0f + 3.0f * kCubic * bounded * bounded);
  }
};

template <Precision P>
struct ActivationFn<Activation::kQuickGelu, P> {
  static constexpr float kSlope = 1.702f;
  static __device__ __forceinline__ float value(float x) { return x * sigmoid<P>(kSlope * x); }
  static __device__ __forceinline__ float derivative(float x) {
    const float s = sigmoid<P>(kSlope * x);
    return s + x * (kSlope * s * sigmoid_of_negative<P>(kSlope * x, s));  // kSlope * x may overflow
  }
};

template <Precision P>
struct ActivationFn<Activation::kSilu, P> {
  static __device__ __forceinline__ float value(float x) { return x * sigmoid<P>(x); }
  static __device__ __forceinline__ float derivative(float x) {
    const float s = sigmoid<P>(x);
    return s + x * s * sigmoid_of_negative<P>(x, s);
  }
};

// `x <= 0 ? 0 : x` rather than fmaxf: NaN passes through, as in torch.
template <Precision P>
struct ActivationFn<Activation::kRelu, P> {
  static __device__ __forceinline__ float value(float x) { return x <= 0.0f ? 0.0f : x; }
  static __device__ __forceinline__ float derivative(float x) { return x <= 0.0f ? 0.0f : 1.0f; }
};

template <Precision P>
struct ActivationFn<Activation::kRelu2, P> {
  static __device__ __forceinline__ float value(float x) { return x <= 0.0f ? 0.0f : x * x; }
  static __device__ __forceinline__ float derivative(float x) { return x <= 0.0f ? 0.0f : 2.0f * x; }
};

template <Precision P>
struct ActivationFn<Activation::kSigmoid, P> {
  static __device__ __forceinline__ float value(float x) { return sigmoid<P>(x); }
  static __device__ __forceinline__ float derivative(float x) { return sigmoid<P>(x) * sigmoid<P>(-x); }
};

}  // namespace fused_mlp
