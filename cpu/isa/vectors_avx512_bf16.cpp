// The kernels of few_rows.h for bfloat16, by AVX-512's dot products of pairs, which do twice as many products as with
// float32.
#include "../../torch-ext/operands/activation.h"
#include "../few_rows/few_rows.h"

#if defined(__x86_64__)

#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,avx512bf16"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,avx512bf16")
#endif

namespace fused_mlp::avx512_bf16 {

constexpr int kWidth = 16;
#define FUSED_MLP_PERMUTES

// clang-format off: each needs those before it
#include "math.inl"
#include "memory.inl"
#include "lanes_avx512.inl"
// clang-format on

#define FUSED_MLP_DOTS

// sums + a[0] b[0] + a[1] b[1], for the pair of bfloat16 in each lane
FUSED_MLP_INLINE Vec add_dots(Vec sums, Vec a, Vec b) {
  return (Vec)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b);
}

#include "../few_rows/few_rows.inl"

}  // namespace fused_mlp::avx512_bf16

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
