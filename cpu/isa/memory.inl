// Blocks of values in memory, of float or of bfloat16; see math.inl, which must come before and explains how this file
// is included.

struct BFloat16 {
  uint16_t bits;
};

template <typename T>
constexpr bool kIsBf16 = false;
template <>
constexpr bool kIsBf16<BFloat16> = true;

FUSED_MLP_INLINE float widened(BFloat16 x) {
  const uint32_t bits = uint32_t{x.bits} << 16;
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

// The kernels work on blocks of two vectors.
constexpr int64_t kBlock = 2 * kWidth;

FUSED_MLP_INLINE Pair load(const float* from) {
  Pair x;
  for (int h = 0; h < 2; ++h) __builtin_memcpy(&x.half[h], from + h * kWidth, sizeof(Vec));
  return x;
}

FUSED_MLP_INLINE Pair load(const BFloat16* from) {
  VecBits x;
  __builtin_memcpy(&x, from, sizeof(x));
  return from_bf16(x);
}

FUSED_MLP_INLINE void store(float* to, Pair x) {
  for (int h = 0; h < 2; ++h) __builtin_memcpy(to + h * kWidth, &x.half[h], sizeof(Vec));
}

FUSED_MLP_INLINE void store(BFloat16* to, Pair x) {
  const VecBits rounded = to_bf16(x);
  __builtin_memcpy(to, &rounded, sizeof(rounded));
}

// The first `count` elements of a block only.
template <typename T>
FUSED_MLP_INLINE Pair load(const T* from, int64_t count) {
  if (count == kBlock) return load(from);
  T block[kBlock] = {};
  __builtin_memcpy(block, from, count * sizeof(T));
  return load(block);
}

// The same for float32 values, in the order of a block of T.
template <typename T>
FUSED_MLP_INLINE Pair load_as(const float* from, int64_t count) {
  if constexpr (!kIsBf16<T>) return load(from, count);
  Pair x{};
  for (int64_t i = 0; i < count; ++i) x.half[i % 2][i / 2] = from[i];
  return x;
}

template <typename T>
FUSED_MLP_INLINE void store(T* to, int64_t count, Pair x) {
  if (count == kBlock) return store(to, x);
  T block[kBlock];
  store(block, x);
  __builtin_memcpy(to, block, count * sizeof(T));
}

template <typename T>
FUSED_MLP_INLINE T* row(Matrix matrix, int64_t r) {
  return static_cast<T*>(matrix.data) + r * matrix.row_stride;
}
