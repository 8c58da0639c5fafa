// Elements of codes.h as vectors, for one instruction set; see math.inl, which must come before and explains how this
// file is included. It needs kBlock, and lookup(values, codes), which returns the values at the low four bits of each
// lane.

using quantized::Codes;
using quantized::Format;

template <Format kFormat>
constexpr bool kHalves = kFormat == Format::kHighFirst || kFormat == Format::kLowFirst;

// All values of a block of 4-bit codes, or the factor of a block of bytes.
struct Values {
  Vec vectors[16 / kWidth];
};

FUSED_MLP_INLINE float nested_scale(const Codes& codes, int64_t block) {
  float product = codes.nested_code[static_cast<const uint8_t*>(codes.scales)[block]] *
                  codes.nested_scales[block >> codes.nested_shift];
  __asm__("" : "+x"(product));  // round it on its own
  return product + codes.offset;
}

template <Format kFormat, bool kNested>
FUSED_MLP_INLINE Values values_of(const Codes& codes, int64_t block) {
  float scale, zero = 0.0f;
  if constexpr (kNested) {
    scale = nested_scale(codes, block);
  } else {
    scale = static_cast<const float*>(codes.scales)[block];
  }
  if constexpr (kFormat == Format::kLowFirst) {
    uint32_t bits;
    __builtin_memcpy(&bits, &scale, sizeof(bits));
    zero = static_cast<float>(static_cast<int32_t>(bits & kZeroBits));
    bits &= ~kZeroBits;
    __builtin_memcpy(&scale, &bits, sizeof(bits));
  }
  Values values;
  if constexpr (kHalves<kFormat>) {
    for (int i = 0; i < 16 / kWidth; ++i) {
      Vec all;
      __builtin_memcpy(&all, codes.values + i * kWidth, sizeof(all));
      values.vectors[i] = (kFormat == Format::kLowFirst ? all - zero : all) * scale;
    }
  } else {
    // The bits of e4m3 are moved to their places in float32, which gives 2^-120 times the value.
    values.vectors[0] = splat(scale * (kFormat == Format::kFp8 ? 0x1p120f : codes.factor));
  }
  return values;
}

// A block of kBlock elements from a given position: those of even columns, and those of odd ones.
template <Format kFormat>
FUSED_MLP_INLINE Pair decode(const Values& values, const uint8_t* at) {
  if constexpr (kHalves<kFormat>) {
    const VecBits pairs = widened_bytes(at);
    const Vec high = lookup(values.vectors, pairs >> 4), low = lookup(values.vectors, pairs);
    return kFormat == Format::kHighFirst ? Pair{{high, low}} : Pair{{low, high}};
  } else {
    const VecBits pairs = widened_words(at);
    typedef int32_t Integers __attribute__((vector_size(kWidth * 4)));
    const Integers even = (Integers)(pairs << 24), odd = (Integers)(pairs << 16);
    const Vec factor = values.vectors[0];
    if constexpr (kFormat == Format::kInt8) {
      return {{__builtin_convertvector(even >> 24, Vec) * factor, __builtin_convertvector(odd >> 24, Vec) * factor}};
    } else {
      return {{(Vec)(even >> 4 & 0x87f00000) * factor, (Vec)(odd >> 4 & 0x87f00000) * factor}};
    }
  }
}

// Calls visitor.template operator()<kFormat, kNested>() for a weight.
template <typename Visitor>
FUSED_MLP_INLINE void visit_format(const Codes& codes, const Visitor& visitor) {
  switch (codes.format) {
    case Format::kHighFirst:
      if (codes.nested_scales != nullptr) return visitor.template operator()<Format::kHighFirst, true>();
      return visitor.template operator()<Format::kHighFirst, false>();
    case Format::kLowFirst:
      return visitor.template operator()<Format::kLowFirst, false>();
    case Format::kInt8:
      return visitor.template operator()<Format::kInt8, false>();
    case Format::kFp8:
      return visitor.template operator()<Format::kFp8, false>();
  }
}
