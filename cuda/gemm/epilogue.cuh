// The epilogue of every GEMM: what happens to the sums before they are rounded and stored. A main loop only has to pass
// its sums; how it holds them, and where it finds their biases, is its own business.
#pragma once

#include "../activations.cuh"
#include "../vector.cuh"
#include "problem.h"

namespace fused_mlp {

__device__ __forceinline__ float2 to_float2(__nv_bfloat162 v) { return __bfloat1622float2(v); }
__device__ __forceinline__ float2 to_float2(__half2 v) { return __half22float2(v); }

template <typename Element>
struct ElementTraits;
template <>
struct ElementTraits<__nv_bfloat16> {
  static constexpr Precision kPrecision = Precision::kBFloat16;
  using Pair = __nv_bfloat162;
};
template <>
struct ElementTraits<__half> {
  static constexpr Precision kPrecision = Precision::kFloat16;
  using Pair = __half2;
};

// Elements `column` and `column + 1` of a bias of n elements, both even. Past the end it returns the last two: such
// columns are never stored.
template <typename Element>
__device__ __forceinline__ typename ElementTraits<Element>::Pair load_bias_pair(const void* bias, int column, int n) {
  using Pair = typename ElementTraits<Element>::Pair;
  return __ldg(reinterpret_cast<const Pair*>(static_cast<const Element*>(bias) + min(column, n - 2)));
}

// Prefetches an element's 32-byte sector.
template <typename Element>
__device__ __forceinline__ void prefetch(const void* data, int64_t index) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(static_cast<const Element*>(data) + index));
}

// Prefetches the biases of a tile's columns before its sums are ready, so that the epilogue need not wait for memory.
// Each of the CTA's first threads requests one sector, and one more thread does too, because biases may begin within a
// sector.
template <typename Element>
__device__ __forceinline__ void prefetch_biases(const EpilogueArgs& epilogue, int first, int columns, int n) {
  constexpr int kSector = 32 / sizeof(Element);
  const int offset = threadIdx.x * kSector;
  if ((epilogue.bias == nullptr && epilogue.up_bias == nullptr) || offset >= columns + kSector) return;
  const int column = min(first + offset, n - 1);
  if (epilogue.bias != nullptr) prefetch<Element>(epilogue.bias, column);
  if (epilogue.up_bias != nullptr) prefetch<Element>(epilogue.up_bias, column);
}

// Applies an activation that is known at compile time to an array of values.
template <Activation A, typename Element>
struct FixedActivation {
  template <int kCount>
  __device__ __forceinline__ void operator()(float (&values)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = ActivationFn<A, ElementTraits<Element>::kPrecision>::value(values[i]);
  }
};

// Applies an activation that is looked up by its code on each call: smaller code, for an epilogue whose time does not
// matter.
template <typename Element>
struct CodedActivation {
  int64_t code;
  template <int kCount>
  __device__ __forceinline__ void operator()(float (&values)[kCount]) const {
    visit_activation(code, [&]<Activation A>() { FixedActivation<A, Element>()(values); });
  }
};

// The operands whose sums an epilogue uses.
enum class Operand { kGate, kUp };

// A sum within the limits of its operand. NaN stays NaN.
__device__ __forceinline__ float limited(const GateLimits& limits, Operand operand, float sum) {
  const float bounded = sum > limits.limit ? limits.limit : sum;
  if (operand == Operand::kGate) return bounded;
  return (bounded < -limits.limit ? -limits.limit : bounded) + limits.up_offset;
}

// act(gate), times up if the product is gated.
template <Product kProduct>
struct GluEpilogue {
  // Leaves a thread's results in `value`. sums(operand, take) calls take(i, sum plus bias) for each i of `value`.
  template <int kCount, typename Act, typename Sums>
  static __device__ __forceinline__ void apply(float (&value)[kCount], const Act& activate, Sums&& sums) {
    sums(Operand::kGate, [&](int i, float gate) { value[i] = gate; });
    activate(value);
    if constexpr (is_gated(kProduct)) sums(Operand::kUp, [&](int i, float up) { value[i] *= up; });
  }
};

// Returns two adjacent results of a row, the first in an even column, with the addend added if there is one.
template <typename Element, Product kProduct>
__device__ __forceinline__ uint32_t with_addend(const EpilogueArgs& epilogue, uint32_t results, int64_t row,
                                                int64_t column) {
  if constexpr (kProduct == Product::kPlain) {
    if (epilogue.addend.data != nullptr) {
      using Pair = typename ElementTraits<Element>::Pair;
      const Element* const place =
          static_cast<const Element*>(epilogue.addend.data) + row * epilogue.addend.row_stride + column;
      const float2 addend = to_float2(*reinterpret_cast<const Pair*>(place));
      const float2 result = to_float2(*reinterpret_cast<const Pair*>(&results));
      results =
          round_pair<Element>(fmaf(result.x, epilogue.factor, addend.x), fmaf(result.y, epilogue.factor, addend.y));
    }
  }
  return results;
}

// From the gradient of act(gate) * up: the gradients of gate and up, and the value itself. These products are
// memory-bound, so the more accurate fit of the activation costs nothing.
template <Activation A>
struct GluGradient {
  using Fn = ActivationFn<A, Precision::kFloat16>;
  float gate, up, value;

  __device__ __forceinline__ GluGradient(float gradient, float at_gate, float at_up) {
    const float activated = Fn::value(at_gate);
    gate = gradient * at_up * Fn::derivative(at_gate);
    up = gradient * activated;
    value = activated * at_up;
  }
};

}  // namespace fused_mlp
