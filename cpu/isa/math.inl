// Vectors of fp32 and the activations on them. Included once per instruction set, inside that set's namespace and under
// its target pragma, with kWidth (the number of lanes) defined, and FUSED_MLP_PERMUTES if AVX-512 has intrinsics. It
// must not include anything itself, otherwise code of other headers would be compiled for an instruction set that the
// CPU may lack.

#define FUSED_MLP_INLINE static inline __attribute__((always_inline))

typedef float Vec __attribute__((vector_size(kWidth * 4)));
typedef uint32_t VecBits __attribute__((vector_size(kWidth * 4)));

FUSED_MLP_INLINE Vec splat(float value) { return value - Vec{}; }  // the same bits, also for -0
FUSED_MLP_INLINE Vec magnitude(Vec x) { return (Vec)((VecBits)x & 0x7fffffffu); }
// Comparisons are written so that NaN stays NaN.
FUSED_MLP_INLINE Vec at_most(Vec x, float bound) { return x > bound ? splat(bound) : x; }
FUSED_MLP_INLINE Vec at_least(Vec x, float bound) { return x < bound ? splat(bound) : x; }

// Two vectors. bf16 values are loaded from and stored to a vector of their pairs, the first of each pair in the low
// half of a lane: this takes no shuffles, and no calculation here depends on the order of the lanes.
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

// Flushes tiny values to zero whose products with gradients are subnormal: on those a CPU takes up to a hundred times
// as long. Eager PyTorch, which adds to 1 for both kinds of GELU, has zero from 2^-24.
FUSED_MLP_INLINE Vec without_traces(Vec x) { return x < 0x1p-73f ? Vec{} : x; }

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
  const Vec bell = without_traces(exp_of(exponent));
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
// rounding may cause. It is the formula of the tail above from t = 0, with s = 1 / (1 + 3 t / 8), of lower degree.
FUSED_MLP_INLINE Vec probability_for_bf16(Vec x) {
  const Vec t = at_most(magnitude(x), 14.9f);
  const Reduced exponent = reduce(t * t * -0.5f);
  const Vec r = exponent.remainder;
  constexpr float kExp[] = {0x1.5224d0p-5f, 0x1.571d06p-3f, 0x1.0006b8p-1f};
  const Vec excess = r * r * polynomial(r, kExp) + r;
  constexpr float kTail[] = {-0x1.70ecf6p-4f, 0x1.9790c8p-3f, 0x1.5a5062p-4f, 0x1.426824p-3f, 0x1.315804p-3f};
  const Vec s = 1.0f / (1.0f + t * 0.375f);
  const Vec tail = without_traces(scaled(exponent, excess)) * s * polynomial(s, kTail);
  return x < 0.0f ? tail : 1.0f - tail;
}

#ifdef FUSED_MLP_PERMUTES
// The probability alone, by a table: near each k / 4, for t = |x|, it is a polynomial in 4 t - k, minimax. A row has
// the coefficients of one power, the highest first. Beyond t = 7.6 it is zero; eager's 1 + erf is zero from t = 5.5.

// Relative error 1e-8 up to t = 3, 3.1e-7 up to t = 4 and 1.6e-5 up to t = 7.6; evaluating the polynomial adds a
// rounding error of 1e-7.
alignas(64) static const float kTail[6][32] = {
    {-0x1.45bc7cp-17f, -0x1.142424p-17f, -0x1.29f938p-18f, 0x1.5fddecp-23f,
     0x1.084b7ep-18f,  0x1.873852p-18f,  0x1.7ed2f0p-18f,  0x1.18b572p-18f,
     0x1.2412c8p-19f,  0x1.d7e010p-22f,  -0x1.5f0658p-21f, -0x1.25989ep-20f,
     -0x1.2102eep-20f, -0x1.c2d48ep-21f, -0x1.2cf0eep-21f, -0x1.633e8ep-22f,
     -0x1.7935eep-23f, -0x1.6c090ap-24f, -0x1.417b36p-25f, -0x1.05065ep-26f,
     -0x1.871358p-28f, -0x1.0f0124p-29f, -0x1.5c29a0p-31f, -0x1.9f4c72p-33f,
     -0x1.cc90d6p-35f, -0x1.db6542p-37f, -0x1.c924cap-39f, -0x1.99d9b4p-41f,
     -0x1.56d1acp-43f, -0x1.0baf58p-45f, -0x1.867032p-48f, 0.0f},
    {-0x1.f9e8acp-34f, -0x1.8238e8p-15f, -0x1.494bf8p-14f, -0x1.76a7fap-14f,
     -0x1.499944p-14f, -0x1.bfa80cp-15f, -0x1.8ee052p-16f, 0x1.7c5f78p-20f,
     0x1.24ce60p-16f,  0x1.90b1aap-16f,  0x1.841c80p-16f,  0x1.375fcep-16f,
     0x1.b40020p-17f,  0x1.10efa8p-17f,  0x1.35b040p-18f,  0x1.41221ep-19f,
     0x1.3209dcp-20f,  0x1.0d1a7ap-21f,  0x1.b5f0c2p-23f,  0x1.4a8010p-24f,
     0x1.cf7460p-26f,  0x1.2e51fcp-27f,  0x1.6f5f10p-29f,  0x1.a03280p-31f,
     0x1.b7efe6p-33f,  0x1.b22dcap-35f,  0x1.904bb2p-37f,  0x1.58f016p-39f,
     0x1.15eddap-41f,  0x1.a2f0f2p-44f,  0x1.2772aep-46f,  0.0f},
    {0x1.1057f2p-10f,  0x1.eeee3ep-11f,  0x1.688280p-11f,  0x1.67c01cp-12f,
     -0x1.07202cp-28f, -0x1.188c30p-12f, -0x1.ba14b6p-12f, -0x1.e5e7eep-12f,
     -0x1.ba495ep-12f, -0x1.6017e8p-12f, -0x1.f69114p-13f, -0x1.45e9c6p-13f,
     -0x1.83441ap-14f, -0x1.a7dfbap-15f, -0x1.acf75ap-16f, -0x1.927f1cp-17f,
     -0x1.5ee016p-18f, -0x1.1ca304p-19f, -0x1.ae494ap-21f, -0x1.2f5844p-22f,
     -0x1.8f41b6p-24f, -0x1.eae1c0p-26f, -0x1.1a0e52p-27f, -0x1.2f1caap-29f,
     -0x1.30be96p-31f, -0x1.1ebe5cp-33f, -0x1.f92e24p-36f, -0x1.a0bb3ap-38f,
     -0x1.420100p-40f, -0x1.d2374ap-43f, -0x1.3c456ap-45f, 0.0f},
    {0x1.80821cp-36f, 0x1.8bf22cp-9f,  0x1.688360p-8f,  0x1.ce8ba0p-8f,
     0x1.ef8e10p-8f,  0x1.d394d2p-8f,  0x1.8de0e0p-8f,  0x1.3537f8p-8f,
     0x1.ba4ba6p-9f,  0x1.248384p-9f,  0x1.66fb10p-10f, 0x1.99b858p-11f,
     0x1.b3aae0p-12f, 0x1.b02aeep-13f, 0x1.9056b8p-14f, 0x1.5a9b4ap-15f,
     0x1.18a6aep-16f, 0x1.a94966p-18f, 0x1.2da8b6p-19f, 0x1.90c496p-21f,
     0x1.f2caaap-23f, 0x1.22dbe6p-24f, 0x1.3df060p-26f, 0x1.45ce9cp-28f,
     0x1.390beep-30f, 0x1.1a11c8p-32f, 0x1.dcc006p-35f, 0x1.79ecc0p-37f,
     0x1.190ba0p-39f, 0x1.882bd6p-42f, 0x1.00bb78p-44f, 0.0f},
    {-0x1.988454p-4f,  -0x1.8bf2bap-4f,  -0x1.6883d0p-4f,  -0x1.345d5ep-4f,
     -0x1.ef8e58p-5f,  -0x1.7610bap-5f,  -0x1.094086p-5f,  -0x1.616454p-6f,
     -0x1.ba4b44p-7f,  -0x1.0402e0p-7f,  -0x1.1f2f06p-8f,  -0x1.29fa54p-9f,
     -0x1.227212p-10f, -0x1.09f38ap-11f, -0x1.c98970p-13f, -0x1.71b91cp-14f,
     -0x1.18a974p-15f, -0x1.904ac4p-17f, -0x1.0c296ap-18f, -0x1.5185dap-20f,
     -0x1.8f15dep-22f, -0x1.bb4970p-24f, -0x1.ce8d30p-26f, -0x1.c56912p-28f,
     -0x1.a1858cp-30f, -0x1.692dd4p-32f, -0x1.258264p-34f, -0x1.c02216p-37f,
     -0x1.41611ap-39f, -0x1.b106b8p-42f, -0x1.120dc8p-44f, 0.0f},
    {0x1.000000p-1f,  0x1.9aecbap-2f,  0x1.3bf144p-2f,  0x1.d02200p-3f,
     0x1.44ed0cp-3f,  0x1.b0bdd2p-4f,  0x1.11a46ep-4f,  0x1.482a24p-5f,
     0x1.74bcf8p-6f,  0x1.90924ep-7f,  0x1.96f4e6p-8f,  0x1.869044p-9f,
     0x1.61de20p-10f, 0x1.2e86fep-11f, 0x1.e7dbccp-13f, 0x1.72d95ap-14f,
     0x1.09ad7ep-15f, 0x1.66a5c8p-17f, 0x1.c8073cp-19f, 0x1.110580p-20f,
     0x1.33ca4cp-22f, 0x1.46a196p-24f, 0x1.463d32p-26f, 0x1.32a3a4p-28f,
     0x1.0f313ep-30f, 0x1.c34cd2p-33f, 0x1.6140f2p-35f, 0x1.041824p-37f,
     0x1.683d3cp-40f, 0x1.d53fdep-43f, 0x1.1f6a26p-45f, 0.0f},
};

// For bf16: relative error 1.1e-5 up to t = 4 and 3.4e-4 up to t = 7.6.
alignas(64) static const float kTailForBf16[5][32] = {
    {-0x1.98d380p-17f, -0x1.840c2ap-15f, -0x1.49c36cp-14f, -0x1.768368p-14f,
     -0x1.48aeb0p-14f, -0x1.bcf014p-15f, -0x1.893d9cp-16f, 0x1.c2abd4p-20f,
     0x1.272c3ap-16f,  0x1.910ae2p-16f,  0x1.8303f2p-16f,  0x1.359880p-16f,
     0x1.b05aa2p-17f,  0x1.0df0a2p-17f,  0x1.31772ep-18f,  0x1.3bdf90p-19f,
     0x1.2c2758p-20f,  0x1.072158p-21f,  0x1.aadd6ep-23f,  0x1.41137cp-24f,
     0x1.c0ae64p-26f,  0x1.239fc4p-27f,  0x1.610890p-29f,  0x1.8e601cp-31f,
     0x1.a35e70p-33f,  0x1.9c1d8ap-35f,  0x1.7a474ap-37f,  0x1.447baap-39f,
     0x1.043994p-41f,  0x1.865ebep-44f,  0x1.11f10ep-46f,  0.0f},
    {0x1.11bf7cp-10f,  0x1.ed9562p-11f,  0x1.67c868p-11f,  0x1.67cc3cp-12f,
     0x1.47dfe8p-20f,  -0x1.16a54cp-12f, -0x1.b8388ap-12f, -0x1.e48b02p-12f,
     -0x1.b993f0p-12f, -0x1.5ff334p-12f, -0x1.f6fd02p-13f, -0x1.469e92p-13f,
     -0x1.84a79cp-14f, -0x1.aa0948p-15f, -0x1.afd8d8p-16f, -0x1.95e3b4p-17f,
     -0x1.627824p-18f, -0x1.2018a0p-19f, -0x1.b46114p-21f, -0x1.3446ecp-22f,
     -0x1.969f52p-24f, -0x1.f50e00p-26f, -0x1.2090f0p-27f, -0x1.36d8d4p-29f,
     -0x1.394986p-31f, -0x1.27860ep-33f, -0x1.04feeep-35f, -0x1.afbc28p-38f,
     -0x1.4e7eb0p-40f, -0x1.e5a0c2p-43f, -0x1.4a5b42p-45f, 0.0f},
    {-0x1.028114p-20f, 0x1.8bf400p-9f,  0x1.6883d8p-8f,  0x1.ce8b80p-8f,
     0x1.ef8d24p-8f,   0x1.d39376p-8f,  0x1.8ddf78p-8f,  0x1.3536e0p-8f,
     0x1.ba4a76p-9f,   0x1.248356p-9f,  0x1.66fc28p-10f, 0x1.99bbe0p-11f,
     0x1.b3b220p-12f,  0x1.b036d6p-13f, 0x1.90677cp-14f, 0x1.5ab028p-15f,
     0x1.18be00p-16f,  0x1.a978b0p-18f, 0x1.2dd482p-19f, 0x1.910f02p-21f,
     0x1.f33f2cp-23f,  0x1.233022p-24f, 0x1.3e611ep-26f, 0x1.465a86p-28f,
     0x1.39ad28p-30f,  0x1.1abe74p-32f, 0x1.de1814p-35f, 0x1.7b2bd8p-37f,
     0x1.1a1f4ep-39f,  0x1.89e7dcp-42f, 0x1.020900p-44f, 0.0f},
    {-0x1.988442p-4f,  -0x1.8bf28ep-4f,  -0x1.6883b8p-4f,  -0x1.345d60p-4f,
     -0x1.ef8e82p-5f,  -0x1.7610f6p-5f,  -0x1.0940c0p-5f,  -0x1.6164aap-6f,
     -0x1.ba4b9ep-7f,  -0x1.0402f2p-7f,  -0x1.1f2ed2p-8f,  -0x1.29f9a6p-9f,
     -0x1.2270bap-10f, -0x1.09f174p-11f, -0x1.c983e8p-13f, -0x1.71b2a0p-14f,
     -0x1.18a2a0p-15f, -0x1.903db0p-17f, -0x1.0c1df8p-18f, -0x1.51736ep-20f,
     -0x1.8efa8ep-22f, -0x1.bb23fep-24f, -0x1.ce5da8p-26f, -0x1.c53118p-28f,
     -0x1.a1484cp-30f, -0x1.68ef7cp-32f, -0x1.254750p-34f, -0x1.bfb9c0p-37f,
     -0x1.410b30p-39f, -0x1.b082bcp-42f, -0x1.11af2cp-44f, 0.0f},
    {0x1.000000p-1f,  0x1.9aecbap-2f,  0x1.3bf144p-2f,  0x1.d02200p-3f,
     0x1.44ed0cp-3f,  0x1.b0bdd2p-4f,  0x1.11a46ep-4f,  0x1.482a26p-5f,
     0x1.74bcfap-6f,  0x1.909250p-7f,  0x1.96f4e4p-8f,  0x1.86903cp-9f,
     0x1.61de12p-10f, 0x1.2e86e6p-11f, 0x1.e7db8ap-13f, 0x1.72d908p-14f,
     0x1.09ad24p-15f, 0x1.66a510p-17f, 0x1.c805eap-19f, 0x1.110460p-20f,
     0x1.33c88cp-22f, 0x1.469f14p-24f, 0x1.4639dap-26f, 0x1.329f82p-28f,
     0x1.0f2c82p-30f, 0x1.c342bap-33f, 0x1.6136f0p-35f, 0x1.040ee8p-37f,
     0x1.682d5ep-40f, 0x1.d52678p-43f, 0x1.1f5732p-45f, 0.0f},
};

template <int kTerms>
FUSED_MLP_INLINE Vec probability_by_table(Vec x, const float (&table)[kTerms][32]) {
  const Vec t = at_most(magnitude(x), 7.75f) * 4.0f;
  constexpr float kRound = 0x1.8p23f;  // as in reduce()
  const Vec shifted = t + kRound;
  const Vec u = t - (shifted - kRound);
  Vec tail{};
  for (const float (&row)[32] : table) {
    const __m512 low = _mm512_load_ps(row), high = _mm512_load_ps(row + 16);
    tail = tail * u + (Vec)_mm512_permutex2var_ps(low, (__m512i)shifted, high);
  }
  return x < 0.0f ? tail : 1.0f - tail;
}
#endif

// gelu_pytorch_tanh(x) = x sigmoid(z), z = sqrt(8 / pi) (x + 0.044715 x^3): the same function as with tanh, but
// without its cancellation at negative x.
constexpr float kGeluTanhLinear = 0x1.988454p0f, kGeluTanhCubic = 0x1.2444f2p-4f;

// kForBf16: the result is rounded to bf16, and nothing is added before.
template <Activation kActivation, bool kForBf16>
FUSED_MLP_INLINE Vec activate(Vec x) {
  if constexpr (kActivation == Activation::kLinear) {
    return x;
  } else if constexpr (kActivation == Activation::kGelu) {
#ifdef FUSED_MLP_PERMUTES
    if constexpr (kForBf16) return x * probability_by_table(x, kTailForBf16);
    return x * probability_by_table(x, kTail);
#else
    if constexpr (kForBf16) return x * probability_for_bf16(x);
    return x * normal(x).probability;
#endif
  } else if constexpr (kActivation == Activation::kGeluTanh) {
    const Vec z = x * (kGeluTanhLinear + kGeluTanhCubic * (x * x));
    return times_sigmoid(x, z, without_traces(smaller_sigmoid(z)));
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

// The value and the derivative of factor * sigmoid(z), given factor', factor * z' and the smaller sigmoid.
FUSED_MLP_INLINE Slope sigmoid_slope(Vec factor, Vec z, Vec dfactor, Vec factor_dz, Vec smaller) {
  const Vec sigmoid = z < 0.0f ? smaller : 1.0f - smaller;
  return {times_sigmoid(factor, z, smaller), (smaller - smaller * smaller) * factor_dz + dfactor * sigmoid};
}

FUSED_MLP_INLINE Slope sigmoid_slope(Vec factor, Vec z, Vec dfactor, Vec factor_dz) {
  return sigmoid_slope(factor, z, dfactor, factor_dz, smaller_sigmoid(z));
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
    const Vec z = x * (kGeluTanhLinear + kGeluTanhCubic * (x * x));
    return sigmoid_slope(x, z, splat(1.0f), bounded * (kGeluTanhLinear + 3.0f * kGeluTanhCubic * square),
                         without_traces(smaller_sigmoid(z)));
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
