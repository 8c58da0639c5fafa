// Vectors of fp32 and the activations on them. Included once per instruction set, inside that set's namespace and under
// its target pragma, with kWidth (the number of lanes) defined. It must not include anything itself, lest code of other
// headers be compiled for an instruction set that the CPU may lack.

#define FUSED_MLP_INLINE static inline __attribute__((always_inline))

typedef float Vec __attribute__((vector_size(kWidth * 4)));
typedef uint32_t VecBits __attribute__((vector_size(kWidth * 4)));

FUSED_MLP_INLINE Vec splat(float value) { return Vec{} + value; }
FUSED_MLP_INLINE Vec magnitude(Vec x) { return (Vec)((VecBits)x & 0x7fffffffu); }
// Comparisons are written so that NaN stays NaN.
FUSED_MLP_INLINE Vec at_most(Vec x, float bound) { return x > bound ? splat(bound) : x; }
FUSED_MLP_INLINE Vec at_least(Vec x, float bound) { return x < bound ? splat(bound) : x; }

// Two vectors. Those of bf16 values come from and go to a vector of their pairs, the first of each pair in the low half
// of a lane: this takes no shuffles, and no calculation here depends on the order of the lanes.
struct Pair {
  Vec half[2];
};

FUSED_MLP_INLINE Pair from_bf16(VecBits pairs) { return {{(Vec)(pairs << 16), (Vec)(pairs & 0xffff0000u)}}; }

// Rounds to nearest, ties to even; NaN stays NaN.
FUSED_MLP_INLINE VecBits to_bf16(Pair x) {
  VecBits rounded[2];
  for (int h = 0; h < 2; ++h) {
    const VecBits bits = (VecBits)x.half[h];
    rounded[h] = x.half[h] == x.half[h] ? bits + 0x7fffu + ((bits >> 16) & 1u) : bits | 0x400000u;
  }
  return rounded[0] >> 16 | (rounded[1] & 0xffff0000u);
}

// Horner's rule; the coefficient of the highest power comes first.
template <int kTerms>
FUSED_MLP_INLINE Vec polynomial(Vec x, const float (&coefficients)[kTerms]) {
  Vec sum = splat(coefficients[0]);
  for (int i = 1; i < kTerms; ++i) sum = sum * x + coefficients[i];
  return sum;
}

// x = n ln 2 + remainder for -112 <= x <= 0 with an integer n, here in the low bits of `shifted`.
struct Reduced {
  VecBits shifted;
  Vec remainder;
};

FUSED_MLP_INLINE Reduced reduce(Vec x) {
  constexpr float kRound = 0x1.8p23f;  // adding it leaves the integer nearest to the other summand in the low bits
  const Vec shifted = x * 0x1.715476p0f + kRound;
  const Vec n = shifted - kRound;
  return {(VecBits)shifted, x - n * 0x1.62ep-1f - n * 0x1.0bfbe8p-15f};  // ln 2 in two parts; n * the first is exact
}

// 2^n (1 + excess).
FUSED_MLP_INLINE Vec scaled(Reduced x, Vec excess) {
  const Vec scale = (Vec)((x.shifted << 23) + ((127u + 64u) << 23));  // 2^(n + 64): 2^n alone may be subnormal
  return (scale * excess + scale) * 0x1p-64f;
}

// exp(x), subnormal results included; NaN gives NaN. It is 2^n exp(r) with exp(r) = 1 + r + r^2 p(r) and a minimax p
// (relative error 3.1e-9).
FUSED_MLP_INLINE Vec exp_of(Reduced x) {
  const Vec r = x.remainder;
  constexpr float kExp[] = {0x1.6a2256p-10f, 0x1.123b02p-7f, 0x1.5558f8p-5f, 0x1.555490p-3f, 0x1.fffffcp-2f};
  return scaled(x, r * r * polynomial(r, kExp) + r);
}

// sigmoid(-|z|), the smaller of sigmoid(z) and 1 - sigmoid(z).
FUSED_MLP_INLINE Vec smaller_sigmoid(Vec z) {
  const Vec e = exp_of(reduce(-at_most(magnitude(z), 105.0f)));
  return e / (1.0f + e);
}

// x sigmoid(z), for positive z as x - x sigmoid(-z): there one rounding matters instead of three.
FUSED_MLP_INLINE Vec times_sigmoid(Vec x, Vec z, Vec smaller) {
  const Vec product = at_most(x, 0x1p127f) * smaller;  // zero, not NaN, at x = z = infinity
  return z < 0.0f ? product : x - product;
}
FUSED_MLP_INLINE Vec times_sigmoid(Vec x, Vec z) { return times_sigmoid(x, z, smaller_sigmoid(z)); }

// The standard normal distribution: its density and its cumulative probability at x.
struct Normal {
  Vec density, probability;
};

FUSED_MLP_INLINE Normal normal(Vec x) {
  const Vec t = at_most(magnitude(x), 14.9f);  // exp(-t^2 / 2) vanishes there
  // t^2 = high^2 + (t - high)(t + high), whose first product is exact: exp magnifies the error of its argument.
  const Vec high = (Vec)((VecBits)t & 0xfffff000u);
  Reduced exponent = reduce(high * high * -0.5f);
  exponent.remainder += (t - high) * (t + high) * -0.5f;
  const Vec bell = exp_of(exponent);
  // |x| < 1.25: 1/2 + x p(x^2), minimax, absolute error 2.1e-9.
  constexpr float kCentre[] = {-0x1.bdedd4p-18f, 0x1.cebf38p-14f, -0x1.360a4cp-10f,
                               0x1.46bf02p-7f,   -0x1.1057cep-4f, 0x1.988452p-2f};
  const Vec centre = x * polynomial(t * t, kCentre) + 0.5f;
  // The upper tail beyond t is exp(-t^2 / 2) s p(s) with s = 1 / (1 + t / 4), minimax, relative error 8.1e-9.
  constexpr float kTail[] = {-0x1.8ac71ep-5f, 0x1.d3a694p-4f, -0x1.e15b24p-6f, 0x1.900ffap-4f,
                             0x1.236252p-4f,  0x1.8615eep-4f, 0x1.97d404p-4f,  0x1.988b92p-4f};
  const Vec s = 1.0f / (1.0f + t * 0.25f);
  const Vec tail = bell * s * polynomial(s, kTail);
  const Vec outside = x < 0.0f ? tail : 1.0f - tail;
  return {bell * 0x1.988454p-2f, t < 1.25f ? centre : outside};
}

// The cumulative probability alone, for a result that is rounded to bf16: relative error 4.1e-5, a fiftieth of what the
// rounding may take. It is the formula of the tail above from t = 0 on, with s = 1 / (1 + 3 t / 8), of lower degree.
FUSED_MLP_INLINE Vec probability_for_bf16(Vec x) {
  const Vec t = at_most(magnitude(x), 14.9f);
  const Reduced exponent = reduce(t * t * -0.5f);
  const Vec r = exponent.remainder;
  constexpr float kExp[] = {0x1.5224d0p-5f, 0x1.571d06p-3f, 0x1.0006b8p-1f};
  const Vec excess = r * r * polynomial(r, kExp) + r;
  constexpr float kTail[] = {-0x1.70ecf6p-4f, 0x1.9790c8p-3f, 0x1.5a5062p-4f, 0x1.426824p-3f, 0x1.315804p-3f};
  const Vec s = 1.0f / (1.0f + t * 0.375f);
  const Vec tail = scaled(exponent, excess) * s * polynomial(s, kTail);
  return x < 0.0f ? tail : 1.0f - tail;
}

// gelu_pytorch_tanh(x) = x sigmoid(z), z = sqrt(8 / pi) (x + 0.044715 x^3): the same function as with tanh, but
// without its cancellation at negative x.
constexpr float kGeluTanhLinear = 0x1.988454p0f, kGeluTanhCubic = 0x1.2444f2p-4f;

// kForBf16: the result is rounded to bf16, and not added to anything before.
template <Activation kActivation, bool kForBf16>
FUSED_MLP_INLINE Vec activate(Vec x) {
  if constexpr (kActivation == Activation::kLinear) {
    return x;
  } else if constexpr (kActivation == Activation::kGelu) {
    return x * (kForBf16 ? probability_for_bf16(x) : normal(x).probability);
  } else if constexpr (kActivation == Activation::kGeluTanh) {
    return times_sigmoid(x, x * (kGeluTanhLinear + kGeluTanhCubic * (x * x)));
  } else if constexpr (kActivation == Activation::kQuickGelu) {
    return times_sigmoid(x, 1.702f * x);
  } else if constexpr (kActivation == Activation::kSilu) {
    return times_sigmoid(x, x);
  } else if constexpr (kActivation == Activation::kRelu) {
    return at_least(x, 0.0f);
  } else if constexpr (kActivation == Activation::kRelu2) {
    return at_least(x, 0.0f) * at_least(x, 0.0f);
  } else {
    static_assert(kActivation == Activation::kSigmoid);
    return times_sigmoid(splat(1.0f), x);
  }
}

// An activation and its derivative.
struct Slope {
  Vec value, derivative;
};

// The value and the derivative of factor * sigmoid(z), given factor' and factor * z'.
FUSED_MLP_INLINE Slope sigmoid_slope(Vec factor, Vec z, Vec dfactor, Vec factor_dz) {
  const Vec smaller = smaller_sigmoid(z);
  const Vec sigmoid = z < 0.0f ? smaller : 1.0f - smaller;
  return {times_sigmoid(factor, z, smaller), (smaller - smaller * smaller) * factor_dz + dfactor * sigmoid};
}

template <Activation kActivation>
FUSED_MLP_INLINE Slope slope(Vec x) {
  // The smooth derivatives are constant beyond 105, where powers of a bounded x do not overflow. At infinity they are
  // NaN, as in torch: infinity times a slope of zero.
  const Vec bounded = at_least(at_most(x, 105.0f), -105.0f) + (x - x);
  if constexpr (kActivation == Activation::kLinear) {
    return {x, splat(1.0f)};
  } else if constexpr (kActivation == Activation::kGelu) {
    const Normal n = normal(x);
    return {x * n.probability, n.probability + bounded * n.density};
  } else if constexpr (kActivation == Activation::kGeluTanh) {
    const Vec square = bounded * bounded;
    return sigmoid_slope(x, x * (kGeluTanhLinear + kGeluTanhCubic * (x * x)), splat(1.0f),
                         bounded * (kGeluTanhLinear + 3.0f * kGeluTanhCubic * square));
  } else if constexpr (kActivation == Activation::kQuickGelu) {
    return sigmoid_slope(x, 1.702f * x, splat(1.0f), 1.702f * bounded);
  } else if constexpr (kActivation == Activation::kSilu) {
    return sigmoid_slope(x, x, splat(1.0f), bounded);
  } else if constexpr (kActivation == Activation::kRelu) {
    return {at_least(x, 0.0f), x <= 0.0f ? Vec{} : splat(1.0f)};
  } else if constexpr (kActivation == Activation::kRelu2) {
    return {at_least(x, 0.0f) * at_least(x, 0.0f), 2.0f * at_least(x, 0.0f)};
  } else {
    static_assert(kActivation == Activation::kSigmoid);
    return sigmoid_slope(splat(1.0f), x, Vec{}, splat(1.0f));
  }
}
