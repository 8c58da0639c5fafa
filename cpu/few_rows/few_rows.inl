// The kernels of few_rows.h for one instruction set, on the blocks of memory.inl; see math.inl, which explains how this
// file is included. It needs pairwise_sums(a, b), the sums of neighbouring lanes of a, then of b; columns_apart(pair),
// the even elements of its two vectors, then the odd ones; and, without FUSED_MLP_DOTS, decode.inl. With FUSED_MLP_DOTS
// it only has the kernels for bfloat16, by add_dots(sums, a, b), which adds the products of the pair in each lane.

using few_rows::Kept;
using few_rows::kRowsAtOnce;
using few_rows::Layer;
using few_rows::Projection;
using few_rows::Rows;

// Rows whose sums are in registers at the same time.
struct PartOfRows {
  int64_t first, count;
};

// A block of a row as it is multiplied: bf16 unchanged if there are dot products, else widened.
#ifdef FUSED_MLP_DOTS
typedef VecBits Operand;
constexpr int64_t kPreparedBlock = kWidth;  // words of a block of prepared rows

FUSED_MLP_INLINE Operand operand(const BFloat16* from) {
  Operand x;
  __builtin_memcpy(&x, from, sizeof(x));
  return x;
}
FUSED_MLP_INLINE Operand prepared(const float* from) { return operand(reinterpret_cast<const BFloat16*>(from)); }
FUSED_MLP_INLINE void prepare(float* to, Pair values) { store(reinterpret_cast<BFloat16*>(to), values); }
FUSED_MLP_INLINE void add_products(Vec& sums, const Operand& a, const Operand& b) {
  sums = add_dots(sums, (Vec)a, (Vec)b);
}

// Five to seven rows take as long as eight: if that many are left, the last part starts inside the one before.
FUSED_MLP_INLINE PartOfRows part_of(int64_t rows, int64_t part) {
  const int64_t first = part * kRowsAtOnce, left = rows - first;
  if (left >= kRowsAtOnce) return {first, kRowsAtOnce};
  if (part == 0 || left <= kRowsAtOnce / 2) return {first, left};
  return {rows - kRowsAtOnce, kRowsAtOnce};
}
#else
typedef Pair Operand;
constexpr int64_t kPreparedBlock = kBlock;

template <typename T>
FUSED_MLP_INLINE Operand operand(const T* from) {
  return load(from);
}
FUSED_MLP_INLINE Operand prepared(const float* from) { return load(from); }
FUSED_MLP_INLINE void prepare(float* to, Pair values) { store(to, values); }
FUSED_MLP_INLINE void add_products(Vec& sums, const Operand& a, const Operand& b) {
  sums += a.half[0] * b.half[0];
  sums += a.half[1] * b.half[1];
}

FUSED_MLP_INLINE PartOfRows part_of(int64_t rows, int64_t part) {
  const int64_t parts = ceil_div(rows, kRowsAtOnce), first = rows * part / parts;
  return {first, rows * (part + 1) / parts - first};
}
#endif

// The start of a block of features, and the number of them that no earlier block covers.
struct BlockOf {
  int64_t begin, count;

  BlockOf(int64_t features, int64_t index) : begin(index * kBlock), count(kBlock) {
    if (begin + kBlock <= features) return;
    count = features - begin;
    begin = features - kBlock;
  }
};

// Keeps some elements of a block, and sets the others to zero, even NaN.
struct Mask {
  VecBits half[2];
};

FUSED_MLP_INLINE Pair masked(Pair x, const Mask& mask) {
  for (int h = 0; h < 2; ++h) x.half[h] = (Vec)((VecBits)x.half[h] & mask.half[h]);
  return x;
}

// The same for bf16 in pairs.
FUSED_MLP_INLINE VecBits masked(VecBits pairs, const Mask& mask) {
  return pairs & ((mask.half[0] & 0xffffu) | (mask.half[1] & 0xffff0000u));
}

template <typename T>
FUSED_MLP_INLINE Mask last_of_block(int64_t count) {
  Mask mask;
  for (int64_t i = 0; i < kBlock; ++i) {
    mask.half[kIsBf16<T> ? i % 2 : i / kWidth][kIsBf16<T> ? i / 2 : i % kWidth] = i < kBlock - count ? 0u : ~0u;
  }
  return mask;
}

// A block of which only the last `count` elements are not covered by an earlier block.
template <typename T>
FUSED_MLP_INLINE Pair without_others(Pair x, int64_t count) {
  return count == kBlock ? x : masked(x, last_of_block<T>(count));
}

// The sums of each vector's lanes.
FUSED_MLP_INLINE Vec lane_sums(const Vec (&vectors)[kWidth]) {
  Vec level[kWidth];
  for (int i = 0; i < kWidth; ++i) level[i] = vectors[i];
#pragma GCC unroll 8
  for (int count = kWidth / 2; count > 0; count /= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < count; ++i) level[i] = pairwise_sums(level[2 * i], level[2 * i + 1]);
  }
  return level[0];
}

// The products of a block of features with one row of x, each as a vector whose lanes are still to be added. They are
// in the order of the lanes of a pair.
typedef Vec Products[2][kWidth];

template <typename T>
FUSED_MLP_INLINE Vec& product_of(Products& products, int64_t feature) {
  return kIsBf16<T> ? products[feature % 2][feature / 2] : products[feature / kWidth][feature % kWidth];
}

// After this many blocks, a sum in registers is added to the sum of the blocks before. Otherwise its rounding errors
// would grow with the number of its terms.
constexpr int64_t kBlocksOfSum = 32;

// The number of rows of weights that are read at once: as many as leave half of the registers free.
constexpr int streams_of(int rows) {
  int streams = 8;
  while (streams * rows > kWidth) streams /= 2;
  return streams > 0 ? streams : 1;
}

// Multiplies a block of features, from `begin`, with rows of x. A group of weight rows is read in parallel, and while
// it is multiplied, the next one is prefetched: the hardware prefetches only to the end of a page.
template <typename T, int kRows>
void multiply(const Projection& projection, int64_t in_features, int64_t begin, Rows x, Products* products) {
  constexpr int kStreams = streams_of(kRows);
  const int64_t last = (in_features - 1) / kBlock, rest = in_features - last * kBlock;
  const Mask mask = last_of_block<T>(rest);
  for (int64_t f = 0; f < kBlock; f += kStreams) {
    const T* weights = static_cast<const T*>(projection.weight) + (begin + f) * projection.row_stride;
    Vec sums[kStreams][kRows] = {}, earlier[kStreams][kRows] = {};
    const auto add = [&](int64_t from, int64_t to, const auto& kept) __attribute__((always_inline)) {
      Operand values[kStreams];
#pragma GCC unroll 8
      for (int s = 0; s < kStreams; ++s) {
        const T* at = weights + s * projection.row_stride + from;
        __builtin_prefetch(at + kStreams * projection.row_stride);
        values[s] = kept(operand(at));
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const Operand row = prepared(x.data + r * x.stride + to);
#pragma GCC unroll 8
        for (int s = 0; s < kStreams; ++s) add_products(sums[s][r], values[s], row);
      }
    };
    for (int64_t first = 0; first < last; first += kBlocksOfSum) {
      const int64_t end = first + kBlocksOfSum < last ? first + kBlocksOfSum : last;
      for (int64_t b = first; b < end; ++b) {
        add(b * kBlock, b * kPreparedBlock, [&](Operand values) __attribute__((always_inline)) { return values; });
      }
#pragma GCC unroll 8
      for (int s = 0; s < kStreams; ++s) {
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          earlier[s][r] += sums[s][r];
          sums[s][r] = Vec{};
        }
      }
    }
    add(in_features - kBlock, last * kPreparedBlock,
        [&](Operand values) __attribute__((always_inline)) { return masked(values, mask); });
#pragma GCC unroll 8
    for (int s = 0; s < kStreams; ++s) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) product_of<T>(products[r], f + s) = earlier[s][r] + sums[s][r];
    }
  }
}

#ifndef FUSED_MLP_DOTS
// The same for a quantised weight, whose rows have a multiple of kBlock features: each block is decoded once for all
// rows of x.
template <typename T, Format kFormat, bool kNested, int kRows>
void multiply_codes(const Projection& projection, int64_t in_features, int64_t begin, Rows x, Products* products) {
  constexpr int kStreams = streams_of(kRows);
  constexpr int64_t kSum = kBlocksOfSum * kBlock;
  const Codes codes = *projection.codes;
  const int64_t columns = codes.columns(kSum), row_bytes = codes.bytes(codes.k), block_bytes = codes.bytes(kBlock);
  for (int64_t f = 0; f < kBlock; f += kStreams) {
    const uint8_t* const weights = codes.at(begin + f, 0);
    Vec sums[kStreams][kRows] = {}, earlier[kStreams][kRows] = {};
    for (int64_t first = 0; first < in_features; first += kSum) {
      const int64_t end = first + kSum < in_features ? first + kSum : in_features;
      for (int64_t block = first; block < end; block += columns) {
        Values values[kStreams];
#pragma GCC unroll 8
        for (int s = 0; s < kStreams; ++s) {
          values[s] = values_of<kFormat, kNested>(codes, codes.block(begin + f + s, block));
        }
        const int64_t block_end = block + columns < end ? block + columns : end;
        for (int64_t k = block; k < block_end; k += kBlock) {
          const uint8_t* const at = weights + k / kBlock * block_bytes;
          const float* const row = x.data + k;
#pragma GCC unroll 8
          for (int s = 0; s < kStreams; ++s) {
            __builtin_prefetch(at + (s + kStreams) * row_bytes);
            const Pair decoded = decode<kFormat>(values[s], at + s * row_bytes);
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) add_products(sums[s][r], decoded, load(row + r * x.stride));
          }
        }
      }
#pragma GCC unroll 8
      for (int s = 0; s < kStreams; ++s) {
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          earlier[s][r] += sums[s][r];
          sums[s][r] = Vec{};
        }
      }
    }
#pragma GCC unroll 8
    for (int s = 0; s < kStreams; ++s) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) product_of<T>(products[r], f + s) = earlier[s][r];
    }
  }
}
#endif

template <typename T>
FUSED_MLP_INLINE Pair add_up(const Products& products, const Projection& projection, int64_t begin) {
  Pair sums{{lane_sums(products[0]), lane_sums(products[1])}};
  if (projection.bias != nullptr) {
    const Pair bias = load(static_cast<const T*>(projection.bias) + begin);
    for (int h = 0; h < 2; ++h) sums.half[h] += bias.half[h];
  }
  return sums;
}

// Stores a block of a row of a matrix; of the last block only those elements that no earlier block covers.
template <typename T>
FUSED_MLP_INLINE void store_block(Matrix to, int64_t r, BlockOf block, Pair values) {
  T* const at = row<T>(to, r) + block.begin;
  if (block.count == kBlock) return store(at, values);
  T all[kBlock];
  store(all, values);
  const int64_t others = kBlock - block.count;
  __builtin_memcpy(at + others, all + others, block.count * sizeof(T));
}

// A value after it has been rounded.
FUSED_MLP_INLINE Pair rounded(Pair x, const float*) { return x; }
FUSED_MLP_INLINE Pair rounded(Pair x, const BFloat16*) { return from_bf16(to_bf16(x)); }

// A block in the order in which it is multiplied.
template <typename T>
FUSED_MLP_INLINE Pair in_order(const Pair& values, const Rows& rows) {
  return rows.for_codes && !kIsBf16<T> ? columns_apart(values) : values;
}

template <typename T, Activation kActivation>
void finish(const Layer& layer, int64_t index, Rows x, const Products* gates, const Products* ups, Matrix out,
            Rows next, Kept kept) {
  const BlockOf block(layer.out_features, index);
  for (int64_t r = 0; r < x.count; ++r) {
    Pair values = add_up<T>(gates[r], layer.gate, block.begin);
    if (kept.gate.data != nullptr) store_block<T>(kept.gate, r, block, values);
    for (Vec& value : values.half) value = activate<kActivation, kIsBf16<T>>(value);
    if (layer.gated) {
      const Pair factors = add_up<T>(ups[r], layer.up, block.begin);
      if (kept.up.data != nullptr) store_block<T>(kept.up, r, block, factors);
      for (int h = 0; h < 2; ++h) values.half[h] *= factors.half[h];
    }
    if (out.data == nullptr) {
      prepare(next.data + r * next.stride + index * kPreparedBlock,
              in_order<T>(without_others<T>(rounded(values, static_cast<T*>(nullptr)), block.count), next));
      continue;
    }
    store_block<T>(out, r, block, values);
  }
}

// Calls visitor.template operator()<kRows>() for the run-time number of rows.
template <int64_t kMost, int kRows = 1, typename Visitor>
void visit_rows(int64_t rows, const Visitor& visitor) {
  if constexpr (kRows < kMost) {
    if (rows > kRows) return visit_rows<kMost, kRows + 1>(rows, visitor);
  }
  visitor.template operator()<kRows>();
}

// The product of some rows of x with a block of features.
using Multiply = void (*)(const Projection& projection, int64_t in_features, int64_t begin, Rows x, Products* products);

template <typename T>
Multiply multiply_for(const Projection& projection, int64_t rows) {
  Multiply chosen = nullptr;
  visit_rows<kRowsAtOnce>(rows, [&]<int kRows>() {
    chosen = multiply<T, kRows>;
#ifndef FUSED_MLP_DOTS
    if (projection.codes == nullptr) return;
    visit_format(*projection.codes,
                 [&]<Format kFormat, bool kNested>() { chosen = multiply_codes<T, kFormat, kNested, kRows>; });
#endif
  });
  return chosen;
}

// A matrix from a given row; null stays null.
template <typename T>
FUSED_MLP_INLINE Matrix rows_from(Matrix matrix, int64_t first) {
  return matrix.data == nullptr ? matrix : Matrix{row<T>(matrix, first), matrix.row_stride};
}

template <typename T>
void project_as(const Layer& layer, Rows x, int64_t begin, int64_t end, Matrix out, Rows next, Kept kept) {
  auto finished = finish<T, Activation::kLinear>;
  visit_activation(layer.activation, [&]<Activation kActivation>() { finished = finish<T, kActivation>; });
  Products gates[kRowsAtOnce], ups[kRowsAtOnce];
  const int64_t parts = ceil_div(x.count, kRowsAtOnce);
  for (int64_t index = begin; index < end; ++index) {
    const int64_t feature = BlockOf(layer.out_features, index).begin;
    for (int64_t part = 0; part < parts; ++part) {  // after the first part the block of weights is in a cache
      const auto [first, count] = part_of(x.count, part);
      const Rows some{x.data + first * x.stride, x.stride, count, x.for_codes};
      multiply_for<T>(layer.gate, count)(layer.gate, layer.in_features, feature, some, gates);
      if (layer.gated) multiply_for<T>(layer.up, count)(layer.up, layer.in_features, feature, some, ups);
      finished(layer, index, some, gates, ups, rows_from<T>(out, first),
               {next.data + first * next.stride, next.stride, count, next.for_codes},
               {rows_from<T>(kept.gate, first), rows_from<T>(kept.up, first)});
    }
  }
}

static void project(const Layer& layer, Rows x, int64_t begin, int64_t end, Matrix out, Rows next, Kept kept) {
#ifdef FUSED_MLP_DOTS
  project_as<BFloat16>(layer, x, begin, end, out, next, kept);
#else
  const auto project = layer.dtype == DType::kFloat32 ? project_as<float> : project_as<BFloat16>;
  project(layer, x, begin, end, out, next, kept);
#endif
}

template <typename T>
void prepare_as(Matrix x, int64_t features, Rows rows) {
  for (int64_t r = 0; r < rows.count; ++r) {
    for (int64_t index = 0; index * kBlock < features; ++index) {
      const BlockOf block(features, index);
      const Pair values = load(row<T>(x, r) + block.begin);
      prepare(rows.data + r * rows.stride + index * kPreparedBlock,
              in_order<T>(without_others<T>(values, block.count), rows));
    }
  }
}

static void prepare_rows([[maybe_unused]] DType dtype, Matrix x, int64_t features, Rows rows) {
#ifdef FUSED_MLP_DOTS
  prepare_as<BFloat16>(x, features, rows);
#else
  const auto prepare = dtype == DType::kFloat32 ? prepare_as<float> : prepare_as<BFloat16>;
  prepare(x, features, rows);
#endif
}

const few_rows::Kernels kFewRows = {kBlock, prepare_rows, project};
