// Vectors of fp32 and the activations on them. Included once per instruction set, inside that set's namespace and under
// its target pragma, with kWidth (the number of lanes) defined; it must not include anything itself, lest code of
// other headers be compiled for an instruction set that the CPU may lack.

#define FUSED_MLP_INLINE static inline __attribute__((always_inline))

typedef float Vec __attribute__((vector_size(kWidth * 4)));
typedef int32_t VecInt __attribute__((vector_size(kWidth * 4)));
typedef uint32_t VecBits __attribute__((vector_size(kWidth * 4)));
typedef uint16_t VecHalf __attribute__((vector_size(kWidth * 2)));

FUSED_MLP_INLINE Vec splat(float value) { return Vec{} + value; }
FUSED_MLP_INLINE Vec magnitude(Vec x) { return (Vec)((VecBits)x & 0x7fffffffu); }
FUSED_MLP_INLINE Vec at_most(Vec x, float bound) { return x > bound ? splat(bound) : x; }  // NaN stays NaN

FUSED_MLP_INLINE Vec from_bf16(VecHalf x) { return (Vec)(__builtin_convertvector(x, VecBits) << 16); }

// Rounds to nearest, ties to even; NaN stays NaN.
FUSED_MLP_INLINE VecHalf to_bf16(Vec x) {
  const VecBits bits = (VecBits)x;
  const VecBits rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return __builtin_convertvector((x == x ? rounded : bits | 0x400000u) >> 16, VecHalf);
}

// exp(x + low) for -112 <= x <= 0 and a tiny correction `low`, subnormal results included; NaN gives NaN.
// With n the integer nearest to x / ln 2, exp(x) = 2^n exp(r), |r| <= ln(2) / 2, where exp(r) = 1 + r + r^2 p(r) with
// a minimax p of relative error 3.1e-9.
FUSED_MLP_INLINE Vec exp_of_negative(Vec x, Vec low) {
  constexpr float kRound = 0x1.8p23f;  // adding it leaves the integer nearest to the other summand in the low bits
  const Vec shifted = x * 0x1.715476p0f + kRound;
  const Vec n = shifted - kRound;
  const Vec r = ((x - n * 0x1.62ep-1f) - n * 0x1.0bfbe8p-15f) + low;  // ln 2 in two parts: n times the first is exact
  Vec p = splat(0x1.6a2256p-10f);
  p = p * r + 0x1.123b02p-7f;
  p = p * r + 0x1.5558f8p-5f;
  p = p * r + 0x1.555490p-3f;
  p = p * r + 0x1.fffffcp-2f;
  // 2^n as the product of two normal numbers: alone it may be subnormal.
  const VecInt exponent = (VecInt)shifted - 0x4b400000;
  const VecInt half = exponent >> 1;
  const Vec scale = (Vec)((half + 127) << 23);
  const Vec rest = (Vec)((exponent - half + 127) << 23);
  return (r * r * p + r + 1.0f) * scale * rest;
}

// sigmoid(x) and its complement 1 - sigmoid(x) = sigmoid(-x), both without cancellation.
struct Sigmoid {
  Vec value, complement;
};

FUSED_MLP_INLINE Sigmoid sigmoid(Vec x) {
  const Vec e = exp_of_negative(-at_most(magnitude(x), 105.0f), Vec{});
  const Vec larger = 1.0f / (e + 1.0f);
  const Vec smaller = e / (e + 1.0f);
  return {x < 0.0f ? smaller : larger, x < 0.0f ? larger : smaller};
}

// The normal distribution at x: its density and its cumulative probability.
struct Normal {
  Vec density, probability;
};

FUSED_MLP_INLINE Normal normal(Vec x) {
  constexpr float kInverseSqrtTwoPi = 0x1.988454p-2f;
  const Vec t = at_most(magnitude(x), 14.9f);  // exp(-t^2 / 2) is zero there
  // t^2 = high^2 + (t - high) (t + high), the first product exact: exp would magnify its rounding error by t^2 / 2.
  const Vec high = (Vec)((VecBits)t & 0xfffff000u);
  const Vec bell = exp_of_negative(high * high * -0.5f, (t - high) * (t + high) * -0.5f);

  // Centre, |x| < 1.25: 1/2 + x p(x^2), minimax with absolute error 2.1e-9.
  const Vec square = t * t;
  Vec centre = splat(-0x1.bdef4cp-18f);
  (void)square;
  (void)centre;
  (void)kInverseSqrtTwoPi;
  return {bell, bell};
}
