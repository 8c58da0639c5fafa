// Decoding of e4m3 in registers to the exact value in 16 bits. NaN is read as 480, the value that its bits would have.
#pragma once

#include "../../gemm/epilogue.cuh"

namespace fused_mlp {

// Sign, exponent and mantissa are moved to their places in an element, whose exponent has another bias. A
// multiplication by a power of two corrects it, and is exact for subnormal values too.
template <typename Element>
struct Fp8Values {
  using Pair = typename ElementTraits<Element>::Pair;
  static constexpr bool kHalf = ElementTraits<Element>::kPrecision == Precision::kFloat16;
  static constexpr int kShift = kHalf ? 1 : 4;
  static constexpr uint32_t kMagnitude = kHalf ? 0x3F803F80u : 0x07F007F0u, kSign = 0x80008000u;
  static constexpr uint32_t kFactor = kHalf ? 0x5C005C00u : 0x7B807B80u;  // 2^8, 2^120

  // The values in the upper bytes of both halves of a word.
  static __device__ __forceinline__ uint32_t of_upper_bytes(uint32_t word) {
    const uint32_t bits = (word & kSign) | (word >> kShift & kMagnitude), factor = kFactor;
    const Pair value = __hmul2(*reinterpret_cast<const Pair*>(&bits), *reinterpret_cast<const Pair*>(&factor));
    return *reinterpret_cast<const uint32_t*>(&value);
  }

  // Decodes four bytes in the order 0, 2, 1, 3.
  static __device__ __forceinline__ void decode(uint32_t& first, uint32_t& second, uint32_t mixed) {
    first = of_upper_bytes(mixed << 8);
    second = of_upper_bytes(mixed);
  }
};

}  // namespace fused_mlp
