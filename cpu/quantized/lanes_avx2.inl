// Operations of decode.inl in AVX2; see math.inl, which must come before and explains how this file is included.

FUSED_MLP_INLINE VecBits widened_bytes(const uint8_t* at) {
  return (VecBits)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)));
}

FUSED_MLP_INLINE VecBits widened_words(const uint8_t* at) {
  return (VecBits)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
}

FUSED_MLP_INLINE Vec lookup(const Vec (&values)[2], VecBits codes) {
  const __m256 low = _mm256_permutevar8x32_ps((__m256)values[0], (__m256i)codes);
  const __m256 high = _mm256_permutevar8x32_ps((__m256)values[1], (__m256i)codes);
  return (Vec)_mm256_blendv_ps(low, high, (__m256)(codes << 28));  // selects by the fourth bit
}
