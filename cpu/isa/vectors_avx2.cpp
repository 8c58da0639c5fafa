// The kernels of few_rows.h and of matmul.h in AVX2.
#include "../../torch-ext/operands/activation.h"
#include "../../torch-ext/operands/zero_point.h"
#include "../few_rows/few_rows.h"
#include "../few_rows/matmul.h"

#if defined(__x86_64__)

#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif

namespace fused_mlp::avx2 {

constexpr int kWidth = 8;

#include "math.inl"
#include "memory.inl"

// [a0 + a1, a2 + a3, ..., b0 + b1, b2 + b3, ...]
FUSED_MLP_INLINE Vec pairwise_sums(Vec a, Vec b) {
  const __m256d sums = (__m256d)_mm256_hadd_ps((__m256)a, (__m256)b);  // two of a, two of b, two of a, two of b
  return (Vec)_mm256_permute4x64_pd(sums, 0b11011000);
}

FUSED_MLP_INLINE Pair columns_apart(const Pair& x) {
  const __m256 even = _mm256_shuffle_ps((__m256)x.half[0], (__m256)x.half[1], 0b10001000);
  const __m256 odd = _mm256_shuffle_ps((__m256)x.half[0], (__m256)x.half[1], 0b11011101);
  return {
      {(Vec)_mm256_permute4x64_pd((__m256d)even, 0b11011000), (Vec)_mm256_permute4x64_pd((__m256d)odd, 0b11011000)}};
}

// clang-format off: each needs those before it
#include "../quantized/lanes_avx2.inl"
#include "../quantized/decode.inl"
#include "../few_rows/few_rows.inl"
// clang-format on

// [a0, b0, a1, b1, ...], in two halves
FUSED_MLP_INLINE void interleave(Vec a, Vec b, Vec& low, Vec& high) {
  const __m256 first = _mm256_unpacklo_ps((__m256)a, (__m256)b), second = _mm256_unpackhi_ps((__m256)a, (__m256)b);
  low = (Vec)_mm256_permute2f128_ps(first, second, 0x20);
  high = (Vec)_mm256_permute2f128_ps(first, second, 0x31);
}

#include "../few_rows/matmul.inl"

}  // namespace fused_mlp::avx2

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
