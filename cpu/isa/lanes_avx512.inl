// Operations of few_rows.inl and matmul.inl in AVX-512; see math.inl, which must come before and explains how this file
// is included.

// [a0 + a1, a2 + a3, ..., b0 + b1, b2 + b3, ...]
FUSED_MLP_INLINE Vec pairwise_sums(Vec a, Vec b) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  return (Vec)_mm512_permutex2var_ps((__m512)a, even, (__m512)b) +
         (Vec)_mm512_permutex2var_ps((__m512)a, odd, (__m512)b);
}

FUSED_MLP_INLINE Pair columns_apart(const Pair& x) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  return {{(Vec)_mm512_permutex2var_ps((__m512)x.half[0], even, (__m512)x.half[1]),
           (Vec)_mm512_permutex2var_ps((__m512)x.half[0], odd, (__m512)x.half[1])}};
}

// [a0, b0, a1, b1, ...], in two halves
FUSED_MLP_INLINE void interleave(Vec a, Vec b, Vec& low, Vec& high) {
  const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  low = (Vec)_mm512_permutex2var_ps((__m512)a, first, (__m512)b);
  high = (Vec)_mm512_permutex2var_ps((__m512)a, _mm512_add_epi32(first, _mm512_set1_epi32(8)), (__m512)b);
}
