// Decoding of integers in registers; 16 bits represent all of them exactly.
#pragma once

#include "../../gemm/epilogue.cuh"
#include "../problem.h"

namespace fused_mlp {

// The bits of an integer become the last mantissa bits of a number whose last place is worth one: 2^7 in bfloat16, 2^10
// in float16. Then that number is subtracted.
template <typename Element>
struct Integers {
  using Pair = typename ElementTraits<Element>::Pair;
  static constexpr bool kHalf = ElementTraits<Element>::kPrecision == Precision::kFloat16;
  static constexpr uint32_t kBase = kHalf ? 0x64006400u : 0x43004300u;

  static __device__ __forceinline__ Pair pair(uint32_t bits) { return *reinterpret_cast<const Pair*>(&bits); }
  // Combines the bits of a mask with those of the base, in one instruction, where the compiler would use two.
  template <uint32_t kMask>
  static __device__ __forceinline__ uint32_t placed(uint32_t word) {
    uint32_t bits;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(bits) : "r"(word), "n"(kMask), "n"(kBase));  // a & b | c
    return bits;
  }
  static __device__ __forceinline__ uint32_t bits(Pair pair) { return *reinterpret_cast<const uint32_t*>(&pair); }
};

// int8: its last seven bits, minus 128 times its sign bit.
template <typename Element>
struct Int8Values : Integers<Element> {
  using Base = Integers<Element>;

  // The values in the lower bytes of both halves of a word.
  static __device__ __forceinline__ uint32_t of_lower_bytes(uint32_t word) {
    const uint32_t rest = Base::template placed<0x007F007Fu>(word), sign = Base::template placed<0x00800080u>(word);
    return Base::bits(__hsub2(Base::pair(rest), Base::pair(sign)));
  }

  // Decodes four bytes in the order 0, 2, 1, 3.
  static __device__ __forceinline__ void decode(uint32_t& first, uint32_t& second, uint32_t mixed) {
    first = of_lower_bytes(mixed);
    second = of_lower_bytes(mixed >> 8);
  }
};

// Extracts the zero point from a scale of int4.
__device__ __forceinline__ uint32_t take_zero(float& scale) {
  const uint32_t bits = __float_as_uint(scale);
  scale = __uint_as_float(bits & ~kZeroBits);
  return bits & kZeroBits;
}

// int4, with the interface of PairTable: 0 to 15 minus a zero point of 0 to 16; the first of a byte is in its low half.
template <typename Element>
struct Int4Decoder : Integers<Element> {
  using Base = Integers<Element>;
  static constexpr int kBytes = 0;
  // The second value of a pair lies three bits higher, hence the factors (1, 1/8), and the excess of both sums for a
  // zero point of 0. In both halves the zero point has a place in the mantissa.
  static constexpr uint32_t kFactors = Base::kHalf ? 0x30003C00u : 0x3E003F80u;
  static constexpr uint32_t kExcess = Base::kHalf ? 0xD800E400u : 0xC180C300u, kPlaces = 0x00080001u;

  template <int kThreads>
  static __device__ __forceinline__ float fill(uint8_t*, const CodedWeight& weight) {
    return weight.factor;
  }

  static __device__ __forceinline__ void decode_16(uint32_t (&pairs)[8], const uint8_t* codes, uint32_t zero) {
    const uint2 words = *reinterpret_cast<const uint2*>(codes);
    const uint32_t excess = zero * kPlaces + kExcess;
    decode_8(pairs, words.x, excess);
    decode_8(pairs + 4, words.y, excess);
  }

 private:
  static __device__ __forceinline__ void decode_8(uint32_t* pairs, uint32_t word, uint32_t excess) {
    const uint32_t shifted = word >> 1, factors = kFactors;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t both = __byte_perm(word, shifted, 0x4400 + i * 0x1111);
      const uint32_t bits = Base::template placed<0x0078000Fu>(both);
      pairs[i] = Base::bits(__hfma2(Base::pair(bits), Base::pair(factors), Base::pair(excess)));
    }
  }
};

// int4 in the words of tensor-core tiles. A word holds pairs of adjacent columns in nibbles i and i + 4; a value is
// nibble minus 8, times a scale, plus a zero, rounded to bfloat16 once, as in torch's product.
template <typename Element>
struct Int4TileDecoder : Integers<Element> {
  using Base = Integers<Element>;
  using Pair = typename Base::Pair;
  static constexpr int kBytes = 0;

  template <int kThreads>
  static __device__ __forceinline__ float fill(uint8_t*, const CodedWeight&) {
    return 1.0f;
  }

  // A scale and a zero, each twice.
  struct Line {
    Pair scale, zero;
  };
  static __device__ __forceinline__ Line line(uint32_t both) {
    return {Base::pair(__byte_perm(both, 0, 0x1010)), Base::pair(__byte_perm(both, 0, 0x3232))};
  }

  static __device__ __forceinline__ uint32_t decode(uint32_t word, int i, const Line& line) {
    const uint32_t more = Base::template placed<0x000F000Fu>(word >> 4 * i), excess = 0x43084308u;  // 128 + 8
    return Base::bits(__hfma2(__hsub2(Base::pair(more), Base::pair(excess)), line.scale, line.zero));
  }
};

}  // namespace fused_mlp
