// Decoding of 16 codes of a block of 64 in a lane's registers, and the matching elements of k.
#pragma once

#include "../decode/bytes.cuh"
#include "problem.h"

namespace fused_mlp {

template <typename Element, StackCoding kCoding>
struct StackDecoder;

// 16 adjacent values that share a scale, by which sums of codes are multiplied.
template <typename Element>
struct StackDecoder<Element, StackCoding::kFp8> {
  static constexpr bool kScalesSums = true;
  static constexpr float kUnscale = 1.0f;  // the factor for the sums at the end
  using RawScales = float;
  using Scale = float;

  // The first of the eight elements of a that match the lane's first or second half of codes.
  static __device__ __forceinline__ int element(int quarter, int half) { return 16 * quarter + 8 * half; }
  // Permutes 16-byte chunks, so that those read at the same time lie in distinct banks.
  template <int kPieces>
  static __device__ __forceinline__ int swizzled(int row, int piece) {
    static_assert(kPieces % 8 == 0);
    return piece ^ row % 2 * 4;
  }
  static __device__ __forceinline__ int swizzled_tokens(int row, int piece) { return piece ^ row % 2; }

  template <int kPieces>
  static __device__ __forceinline__ void decode(uint32_t (&pairs)[8], const uint8_t* codes, int row, int block,
                                                int quarter, Scale) {
    ByteDecoder<Coding::kFp8, Element>::decode_16(pairs, nullptr,
                                                  codes + swizzled<kPieces>(row, block * 4 + quarter) * 16);
  }
  static __device__ __forceinline__ void order(uint32_t (&)[4]) {}
  static __device__ __forceinline__ Scale ready(RawScales raw) { return raw; }
  static __device__ __forceinline__ RawScales load(const CodedStack& weight, int at, int block) {
    return __ldg(static_cast<const float*>(weight.scales) + at + (block >> weight.scale_shift));
  }
};

// Eight adjacent values from each half of the block, and each half has a scale. Codes are multiplied by it, which is
// exact in bfloat16 for scales of 2^-100 to 2^33. Smaller scales lose bits, and larger ones count as infinite.
template <>
struct StackDecoder<__nv_bfloat16, StackCoding::kMxfp4> {
  static constexpr bool kScalesSums = false;
  static constexpr float kUnscale = 4294967296.0f;  // scales in registers are smaller by this factor
  using RawScales = uint32_t;
  using Scale = uint32_t;

  static __device__ __forceinline__ int element(int quarter, int half) { return kMxBlock * half + 8 * quarter; }
  template <int kPieces>
  static __device__ __forceinline__ int swizzled(int row, int piece) {
    static_assert(kPieces == 4 || kPieces % 8 == 0);
    return piece ^ (kPieces == 4 ? row / 2 % 4 : row % 8);
  }
  static __device__ __forceinline__ int swizzled_tokens(int row, int piece) { return piece ^ row % 2 * 4; }

  template <int kPieces>
  static __device__ __forceinline__ void decode(uint32_t (&pairs)[8], const uint8_t* codes, int row, int block,
                                                int quarter, Scale both) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t scales = scales_of(both, half);
      const uint8_t* const piece = codes + swizzled<kPieces>(row, block * 2 + half) * 16;
      const uint32_t word = *reinterpret_cast<const uint32_t*>(piece + quarter * 4);
      decode_pairs(pairs + half * 4, word, scales);
      decode_pairs(pairs + half * 4 + 2, word >> 8, scales);
    }
  }

  // Puts elements of a into the order in which codes are decoded.
  static __device__ __forceinline__ void order(uint32_t (&pairs)[4]) {
    const uint32_t first[4] = {pairs[0], pairs[1], pairs[2], pairs[3]};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      pairs[2 * i] = __byte_perm(first[i], first[i + 2], 0x5410);
      pairs[2 * i + 1] = __byte_perm(first[i], first[i + 2], 0x7632);
    }
  }
  static __device__ __forceinline__ RawScales load(const CodedStack& weight, int at, int block) {
    return __ldg(reinterpret_cast<const uint16_t*>(static_cast<const uint8_t*>(weight.scales) + at) + block);
  }

  static __device__ __forceinline__ Scale ready(RawScales raw) { return both_scales(raw); }

  // The exponents of a block's halves with the bias of bfloat16, minus 32, plus the bias that the bits of codes lack.
  static __device__ __forceinline__ uint32_t both_scales(RawScales raw) {
    return __vminu2(__byte_perm(raw, 0, 0x4140) * 0x80u + 0x2F002F00u, 0x7F807F80u);
  }
  static __device__ __forceinline__ uint32_t scales_of(uint32_t both, int half) {
    return __byte_perm(both, 0, half == 0 ? 0x1010 : 0x3232);
  }

  // The eight values of a word in order.
  static __device__ __forceinline__ uint4 decode_word(uint32_t word, uint32_t scales) {
    uint32_t pairs[4];
    decode_pairs(pairs, word, scales);
    decode_pairs(pairs + 2, word >> 8, scales);
    return make_uint4(__byte_perm(pairs[0], pairs[1], 0x5410), __byte_perm(pairs[2], pairs[3], 0x5410),
                      __byte_perm(pairs[0], pairs[1], 0x7632), __byte_perm(pairs[2], pairs[3], 0x7632));
  }

 private:
  // Codes 0 and 4 of a word, and codes 1 and 5: one multiplication moves sign, exponent and mantissa to their places in
  // both halves. The multiplication by the scales corrects the exponent's bias, subnormal values included.
  static __device__ __forceinline__ void decode_pairs(uint32_t* pairs, uint32_t word, uint32_t scales) {
    pairs[0] = scaled((word & 0x000F000Fu) * ((1u << 12) + (1u << 6)), scales);
    pairs[1] = scaled((word & 0x00F000F0u) * ((1u << 8) + (1u << 2)), scales);
  }
  static __device__ __forceinline__ uint32_t scaled(uint32_t moved, uint32_t scales) {
    const uint32_t bits = moved & 0x81C081C0u;
    const __nv_bfloat162 found =
        __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&bits), *reinterpret_cast<const __nv_bfloat162*>(&scales));
    return *reinterpret_cast<const uint32_t*>(&found);
  }
};

}  // namespace fused_mlp
