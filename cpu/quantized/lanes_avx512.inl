// Operations of decode.inl in AVX-512; see math.inl, which must come before and explains how this file is included.

FUSED_MLP_INLINE VecBits widened_bytes(const uint8_t* at) {
  return (VecBits)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
}

FUSED_MLP_INLINE VecBits widened_words(const uint8_t* at) {
  return (VecBits)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
}

FUSED_MLP_INLINE Vec lookup(const Vec (&values)[1], VecBits codes) {
  return (Vec)_mm512_permutexvar_ps((__m512i)codes, (__m512)values[0]);
}
