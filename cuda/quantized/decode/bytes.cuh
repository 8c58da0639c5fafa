// Decoding of one-byte weights in registers, with the interface of PairTable, but without a table.
#pragma once

#include <type_traits>

#include "../problem.h"
#include "fp8.cuh"
#include "integers.cuh"

namespace fused_mlp {

template <Coding kCoding, typename Element>
using ByteValues = std::conditional_t<kCoding == Coding::kInt8, Int8Values<Element>, Fp8Values<Element>>;

template <Coding kCoding, typename Element>
struct ByteDecoder {
  static constexpr int kBytes = 0;

  template <int kThreads>
  static __device__ __forceinline__ float fill(uint8_t*, const CodedWeight& weight) {
    return weight.factor;
  }

  static __device__ __forceinline__ void decode_16(uint32_t (&pairs)[8], const uint8_t*, const uint8_t* codes) {
    const uint4 words = *reinterpret_cast<const uint4*>(codes);
    const uint32_t each[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      ByteValues<kCoding, Element>::decode(pairs[2 * i], pairs[2 * i + 1], __byte_perm(each[i], 0, 0x3120));
    }
  }
};

}  // namespace fused_mlp
