#include "amx_gemm.h"

#include "../../torch-ext/operands/activation.h"
#include "../../torch-ext/operands/matrix.h"
#include "../../torch-ext/operands/zero_point.h"

#if defined(__x86_64__)

#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(                                                                       \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,avx512bf16,amx-tile,amx-bf16"))), \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,avx512bf16,amx-tile,amx-bf16")
#endif

namespace fused_mlp::amx {

constexpr int kWidth = 16;
#define FUSED_MLP_PERMUTES

// clang-format off: each needs those before it
#include "../isa/math.inl"
#include "../quantized/lanes_avx512.inl"
#include "../quantized/decode.inl"
// clang-format on

namespace {

// A tile is 16 rows of 64 bytes. It holds 32 weights for each of 16 features, or 16 pairs of inputs for 16 tokens, or
// the fp32 sums of 16 features and 16 tokens. Tiles always come in pairs.
constexpr int64_t kTileBytes = 1024;
constexpr int64_t kTileRows = 16;

// One panel and one pair of tiles of tokens have 2 x 2 tiles of sums.
constexpr int64_t kSums = 4 * 256;

// A slice of a panel's weights (16 KiB) is copied before it is multiplied with all the tokens. The copy stays in L1,
// from where tiles are read twice as fast as from L2 (on a Xeon). If weights were read in place, their rows would often
// share L1 sets. With few tokens the slices are shorter, so that the next one arrives while this one is in use. With up
// to kPairsInPlace pairs of tiles of tokens, each tile of weights is used so seldom that it is read in place.
constexpr int64_t kLongSlice = 256, kShortSlice = 128;
constexpr int64_t kPairsOfLongSlice = 4, kPairsInPlace = 4;

// The distance of the prefetch, for weights whose columns are adjacent: each column lies in its own cache lines, which
// no processor prefetches by itself.
constexpr int64_t kColumnsAhead = 128;

// Every panel reads the tokens from L2. Long inputs are therefore multiplied in chunks of their features, for a group
// of panels whose sums also stay in L2 between chunks.
constexpr int64_t kChunkBytes = 1 << 20;
constexpr int64_t kGroupSums = 256 * kSums;  // 1 MiB

int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }

// Some compilers' tile intrinsics do not declare that they read memory. This makes sure that the memory has been
// written.
void finish_stores() { __asm__ volatile("" ::: "memory"); }

void configure_tiles() {
  alignas(64) static const struct {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  _tile_loadconfig(&config);
}

// Transposes 16 x 16 elements of 32 bits, by four perfect shuffles of all of them.
void transpose(__m512i (&rows)[16]) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  for (int round = 0; round < 4; ++round) {
    __m512i shuffled[16];
    for (int i = 0; i < 8; ++i) {
      shuffled[2 * i] = _mm512_permutex2var_epi32(rows[i], low, rows[i + 8]);
      shuffled[2 * i + 1] = _mm512_permutex2var_epi32(rows[i], high, rows[i + 8]);
    }
    for (int i = 0; i < 16; ++i) rows[i] = shuffled[i];
  }
}

__mmask32 first(int64_t count) { return count >= 32 ? ~0u : (1u << count) - 1; }

// Copies columns [begin, begin + count) of a panel into pairs of tiles, padded with zeros, from a column-major weight:
// pairs of columns are moved into one lane, then transposed.
void pack_weight_columns(const Layer& layer, int64_t panel, int64_t begin, int64_t count, char* packed) {
  const int64_t begin_feature = panel * layer.panel_features();
  for (int64_t k = 0; k < count; k += kDepth) {
    for (int64_t half = 0; half < 2; ++half) {
      const Projection& projection = layer.gated && half == 1 ? layer.up : layer.gate;
      const int64_t feature = begin_feature + (layer.gated ? 0 : half * kTileRows);
      const int64_t features = max(0, min(kTileRows, layer.out_features - feature));
      const int64_t step = projection.row_stride;
      const __mmask32 mask = first(max(0, (features - 1) * step + 1));
      const uint16_t* column = projection.weight + feature * step + (begin + k) * projection.column_stride;
      const auto load = [&](int64_t i) {
        if (features == 0 || k + i >= count) return _mm512_setzero_si512();
        const uint16_t* from = column + i * projection.column_stride;
        if (begin + k + i + kColumnsAhead < layer.in_features) {
          _mm_prefetch(from + kColumnsAhead * projection.column_stride, _MM_HINT_T1);
        }
        const __m512i loaded = _mm512_maskz_loadu_epi16(mask, from);
        return step == 1 ? _mm512_cvtepu16_epi32(_mm512_castsi512_si256(loaded))
                         : _mm512_and_si512(loaded, _mm512_set1_epi32(0xffff));
      };
      __m512i lanes[16];
      for (int64_t i = 0; i < 16; ++i) {
        lanes[i] = _mm512_or_si512(load(2 * i), _mm512_slli_epi32(load(2 * i + 1), 16));
      }
      transpose(lanes);
      char* to = packed + k / kDepth * (2 * kTileBytes) + half * kTileBytes;
      for (int64_t r = 0; r < 16; ++r) _mm512_store_si512(to + r * 64, lanes[r]);
    }
  }
}

// A vector of pairs in bf16.
template <Format kFormat>
FUSED_MLP_INLINE __m512i rounded(const Pair& values) {
  if constexpr (kHalves<kFormat>) {  // they already are
    return (__m512i)((VecBits)values.half[0] >> 16 | (VecBits)values.half[1]);
  }
  const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)values.half[1], (__m512)values.half[0]);
  const __m512i in_turn = (__m512i)((VecBits)_mm512_cvtepu16_epi32(
                                        _mm256_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)) *
                                        0x10001u +
                                    0x100000u);
  return _mm512_permutexvar_epi16(in_turn, halves);
}

// Decodes columns [begin, begin + count) of a row, multiples of 32, into tiles.
template <Format kFormat, bool kNested>
FUSED_MLP_INLINE void decode_row(const Codes& codes, int64_t row, int64_t begin, int64_t count, char* packed) {
  const uint8_t* from = codes.at(row, begin);
  const int64_t columns = codes.columns(count);
  int64_t block = codes.block(row, begin);
  for (int64_t k = 0; k < count; k += columns, ++block) {
    Values values = values_of<kFormat, kNested>(codes, block);
    if constexpr (kHalves<kFormat>) {
      const __m256i words = (__m256i)_mm512_cvtneps_pbh((__m512)values.vectors[0]);
      values.vectors[0] = (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16);
    }
    for (int64_t left = min(columns, count - k); left > 0; left -= kDepth) {
      _mm512_store_si512(packed, rounded<kFormat>(decode<kFormat>(values, from)));
      packed += 2 * kTileBytes;
      from += kHalves<kFormat> ? kDepth / 2 : kDepth;
    }
  }
}

// The same for 16 rows, starting at one row; rows past the last repeat it. It prefetches the columns that are read
// next: those after these, or at their end the first columns of a later row.
template <Format kFormat, bool kNested>
void decode_rows(const Codes& of, int64_t first, int64_t last, int64_t step, int64_t begin, int64_t count,
                 char* packed) {
  const Codes codes = of;  // no store may change it
  const bool ends = begin + count == codes.k;
  const int64_t ahead = ends ? step : 0, column = ends ? 0 : begin + count;
  for (int64_t r = 0; r < kTileRows; ++r, packed += 64) {
    const uint8_t* const next = codes.at(min(first + r + ahead, last), column);
    for (int64_t at = 0; at < codes.bytes(count); at += 64) _mm_prefetch(next + at, _MM_HINT_T0);
    decode_row<kFormat, kNested>(codes, min(first + r, last), begin, count, packed);
  }
}

// The 32 rows of weights in a panel. Rows past the last feature repeat that feature, and their sums are not used.
struct Panel {
  const uint16_t* rows[32];
  const Layer* layer;
  int64_t index, begin_feature;

  Panel(const Layer& layer, int64_t index)
      : layer(&layer), index(index), begin_feature(index * layer.panel_features()) {
    const int64_t features = layer.panel_features();
    for (int64_t r = 0; r < 32; ++r) {
      const bool first = r < features;
      const Projection& projection = first ? layer.gate : layer.up;
      const int64_t feature = min(begin_feature + (first ? r : r - features), layer.out_features - 1);
      if (projection.codes == nullptr) rows[r] = projection.weight + feature * projection.row_stride;
    }
  }

  bool is_quantized() const { return layer->gate.codes != nullptr; }

  // True if the elements of a row are adjacent.
  bool by_rows() const { return layer->gate.column_stride == 1; }

  // True if tiles can be read in place: no row is repeated.
  bool has_all_rows() const { return begin_feature + layer->panel_features() <= layer->out_features; }

  // Copies columns [begin, begin + count) into pairs of tiles, and pads them with zeros.
  void pack(int64_t begin, int64_t count, char* packed) const {
    if (!by_rows()) return pack_weight_columns(*layer, index, begin, count, packed);
    if (is_quantized()) return pack_codes(begin, count, packed);
    for (int64_t r = 0; r < 32; ++r) {
      for (int64_t k = 0; k < count; k += kDepth) {
        const __m512i weights = _mm512_maskz_loadu_epi16(first(count - k), rows[r] + begin + k);
        _mm512_store_si512(packed + k / kDepth * (2 * kTileBytes) + r * 64, weights);
      }
    }
  }

 private:
  void pack_codes(int64_t begin, int64_t count, char* packed) const {
    const int64_t features = layer->panel_features(), last = layer->out_features - 1;
    for (int64_t half = 0; half < 2; ++half) {
      const Codes& codes = *(half == 1 && layer->gated ? layer->up : layer->gate).codes;
      const int64_t first = begin_feature + (layer->gated ? 0 : half * kTileRows);
      visit_format(codes, [&]<Format kFormat, bool kNested>() {
        decode_rows<kFormat, kNested>(codes, first, last, features, begin, count, packed + half * kTileBytes);
      });
    }
  }
};

FUSED_MLP_INLINE Vec sum(const float* sums, const Projection& projection, int64_t feature) {
  Vec x;
  __builtin_memcpy(&x, sums, sizeof(x));
  const uint16_t* bias = projection.bias;
  return bias == nullptr ? x : x + (Vec)(VecBits{} + (uint32_t{bias[feature * projection.bias_stride]} << 16));
}

// The epilogue of a panel: biases, activation, gate and store. It advances in steps, so that the vector units run it
// while the tile unit multiplies the next panel. A step handles two adjacent features of the 16 tokens in a tile.
struct Epilogue {
  const Layer* layer;
  Destination to;
  int64_t tokens;
  const float* sums;
  int64_t panel;
  int64_t step, steps;
  // A tile's results before they are stored to a tensor, as pairs of features by 16 tokens each, and the values kept
  // for the backward: gates, and in the second half ups.
  __m512i rows[16], kept[16];

  void (*run)(Epilogue&, int64_t count);

  void advance(int64_t count) {
    if (step < steps) run(*this, min(count, steps - step));
  }

  // The sums of a feature of the panel, for the tokens of a tile.
  const float* sums_of(int64_t tile, int64_t feature) const {
    return sums + tile / 2 * kSums + tile % 2 * 256 + feature / kTileRows * 512 + feature % kTileRows * 16;
  }

  // Calls store(token, lanes) for the tokens of a tile, with their features in the lanes.
  template <typename Store>
  void store_tokens(int64_t tile, __m512i (&pairs)[16], const Store& store) {
    transpose(pairs);
    const int64_t begin = tile * kTileRows, count = min(kTileRows, tokens - begin);
    for (int64_t t = 0; t < count; ++t) store(begin + t, pairs[t]);
  }
};

template <Activation kActivation, bool kGated>
void run_epilogue(Epilogue& epilogue, int64_t count) {
  constexpr int64_t kPairs = kGated ? 8 : 16;  // pairs of features
  const Layer& layer = *epilogue.layer;
  const Destination& to = epilogue.to;
  const bool packs = to.row_stride == 0, keeps = to.kept.gate != nullptr;
  const int64_t begin = epilogue.panel * (2 * kPairs);
  for (; count > 0; --count, ++epilogue.step) {
    const int64_t p = epilogue.step % kPairs, tile = epilogue.step / kPairs;
    Pair values{}, gates{}, ups{};
    for (int64_t h = 0; h < 2; ++h) {
      const int64_t f = 2 * p + h;
      if (begin + f >= layer.out_features) break;
      const float* sums = epilogue.sums_of(tile, f);
      Vec value = sum(sums, layer.gate, begin + f);
      gates.half[h] = value;
      if constexpr (kGated) {
        Vec up = sum(sums + 512, layer.up, begin + f);
        ups.half[h] = up;
        if (layer.limited) {
          value = at_most(value, layer.limit);
          up = at_least(at_most(up, layer.limit), -layer.limit) + layer.up_offset;
        }
        value = activate<kActivation, true>(value) * up;
      } else {
        value = activate<kActivation, true>(value);
      }
      values.half[h] = value;
    }
    if (keeps) {
      epilogue.kept[p] = (__m512i)to_bf16(gates);
      if constexpr (kGated) epilogue.kept[kPairs + p] = (__m512i)to_bf16(ups);
    }
    const __m512i rounded = (__m512i)to_bf16(values);
    if (packs) {
      const int64_t depth_tiles = round_up(layer.out_features, kDepth) / kDepth;
      char* packed = reinterpret_cast<char*>(to.data) + (tile / 2 * depth_tiles + begin / kDepth) * (2 * kTileBytes) +
                     tile % 2 * kTileBytes;
      _mm512_store_si512(packed + (begin % kDepth / 2 + p) * 64, rounded);
    } else {
      epilogue.rows[p] = rounded;
    }
    if (p < kPairs - 1 || begin >= layer.out_features) continue;
    const __mmask32 features = first(min(2 * kPairs, layer.out_features - begin));
    if (!packs) {
      epilogue.store_tokens(tile, epilogue.rows, [&](int64_t token, __m512i lanes) {
        _mm512_mask_storeu_epi16(to.data + token * to.row_stride + begin, features, lanes);
      });
    }
    if (!keeps) continue;
    epilogue.store_tokens(tile, epilogue.kept, [&](int64_t token, __m512i lanes) {
      const int64_t at = token * to.kept.row_stride + begin;
      if constexpr (kGated) {
        _mm256_mask_storeu_epi16(to.kept.gate + at, features, _mm512_castsi512_si256(lanes));
        _mm256_mask_storeu_epi16(to.kept.up + at, features, _mm512_extracti64x4_epi64(lanes, 1));
      } else {
        _mm512_mask_storeu_epi16(to.kept.gate + at, features, lanes);
      }
    });
  }
}

// The epilogue of a product whose features are the rows of its result. A step handles one feature of the 32 tokens in a
// pair of tiles: one cache line.
void run_rows(Epilogue& epilogue, int64_t count) {
  const Destination& to = epilogue.to;
  for (; count > 0; --count, ++epilogue.step) {
    const int64_t f = epilogue.step % 32, pair = epilogue.step / 32;
    const int64_t feature = epilogue.panel * 32 + f, token = pair * kTokens;
    if (feature >= epilogue.layer->out_features) continue;
    const __mmask32 tokens = first(epilogue.tokens - token);
    uint16_t* const row = to.data + feature * to.row_stride + token;
    __m512 low = _mm512_load_ps(epilogue.sums_of(2 * pair, f)),
           high = _mm512_load_ps(epilogue.sums_of(2 * pair + 1, f));
    if (to.accumulate) {
      const __m512i earlier = _mm512_maskz_loadu_epi16(tokens, row);
      const auto widened = [&](__m256i half) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
      };
      low = _mm512_add_ps(low, widened(_mm512_castsi512_si256(earlier)));
      high = _mm512_add_ps(high, widened(_mm512_extracti64x4_epi64(earlier, 1)));
    }
    _mm512_mask_storeu_epi16(row, tokens, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
}

// An epilogue that has no steps left.
Epilogue idle_epilogue(const Layer& layer, int64_t tokens, Destination to) {
  Epilogue epilogue{};
  epilogue.layer = &layer;
  epilogue.to = to;
  epilogue.tokens = tokens;
  if (to.by_feature) {
    epilogue.run = run_rows;
    return epilogue;
  }
  visit_activation(layer.activation, [&]<Activation kActivation>() {
    epilogue.run = layer.gated ? run_epilogue<kActivation, true> : run_epilogue<kActivation, false>;
  });
  return epilogue;
}

// Weights to prefetch: the same column of some rows.
struct Ahead {
  const uint16_t* const* rows;
  int64_t count, column;
};

// Loads the sums of a pair of tiles of weights with a pair of tiles of tokens into tiles 0 to 3, from memory or as
// zeros.
FUSED_MLP_INLINE void load_sums(const float* sums, bool accumulate) {
  if (accumulate) {
    _tile_loadd(0, sums, 64);
    _tile_loadd(1, sums + 256, 64);
    _tile_loadd(2, sums + 512, 64);
    _tile_loadd(3, sums + 768, 64);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
}

FUSED_MLP_INLINE void store_sums(float* sums) {
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + 256, 64);
  _tile_stored(2, sums + 512, 64);
  _tile_stored(3, sums + 768, 64);
}

// Adds to the sums the product of a panel's weights, read in place from column `begin`, and of one pair of tiles of
// tokens, or of the first tile of the pair. Each of its steps also advances the epilogue of earlier sums, and
// prefetches the next panel, if given, in the order of its addresses: a page of memory has a few rows.
void multiply_in_place(const Panel& panel, const Panel* next, int64_t begin, const char* tokens, int64_t steps,
                       float* sums, bool both, Epilogue& epilogue, int64_t epilogue_steps) {
  const uint16_t *low = panel.rows[0] + begin, *high = panel.rows[kTileRows] + begin;
  const int64_t low_stride = panel.layer->gate.row_stride * 2;
  const int64_t high_stride = (panel.layer->gated ? panel.layer->up : panel.layer->gate).row_stride * 2;
  load_sums(sums, begin > 0);
  int64_t ahead_row = 0, ahead_step = 0;
  for (int64_t step = 0; step < steps; ++step) {
    _tile_loadd(6, tokens, 64);
    _tile_loadd(4, low + step * kDepth, low_stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, high + step * kDepth, high_stride);
    _tile_dpbf16ps(2, 5, 6);
    if (both) {
      _tile_loadd(7, tokens + kTileBytes, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
    for (int64_t lines = next == nullptr ? 0 : 32; lines > 0;) {
      const int64_t count = min(lines, steps - ahead_step);
      const uint16_t* from = next->rows[ahead_row] + begin + ahead_step * kDepth;
      for (int64_t i = 0; i < count; ++i) _mm_prefetch(from + i * kDepth, _MM_HINT_T1);
      lines -= count;
      ahead_step += count;
      if (ahead_step < steps) continue;
      ahead_step = 0;
      ++ahead_row;
    }
    tokens += 2 * kTileBytes;
    epilogue.advance(epilogue_steps);
  }
  store_sums(sums);
}

// Adds the product of a packed slice of weights and of one pair of tiles of tokens, or of the first tile of the pair,
// to the sums. Each of its steps also advances the epilogue of earlier sums, and prefetches weights into L2.
void multiply(const char* weights, const char* tokens, int64_t steps, float* sums, bool accumulate, bool both,
              Epilogue& epilogue, int64_t epilogue_steps, Ahead ahead) {
  load_sums(sums, accumulate);
  for (int64_t step = 0; step < steps; ++step) {
    _tile_loadd(6, tokens, 64);
    _tile_loadd(4, weights, 64);
    _tile_dpbf16ps(0, 4, 6);
    for (int64_t r = 0; r < ahead.count; ++r) _mm_prefetch(ahead.rows[r] + ahead.column + step * kDepth, _MM_HINT_T1);
    _tile_loadd(5, weights + kTileBytes, 64);
    _tile_dpbf16ps(2, 5, 6);
    if (both) {
      _tile_loadd(7, tokens + kTileBytes, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
    tokens += 2 * kTileBytes;
    weights += 2 * kTileBytes;
    epilogue.advance(epilogue_steps);
  }
  store_sums(sums);
}

// The division of a product.
struct Blocking {
  int64_t pairs;  // pairs of tiles of tokens
  int64_t slice, chunk;
  int64_t group;
  int64_t slots;  // panels whose sums are kept: a group, but at least two, as one epilogue runs during the next panel

  Blocking(const Layer& layer, int64_t tokens) {
    pairs = round_up(tokens, kTokens) / kTokens;
    slice = pairs < kPairsOfLongSlice ? kShortSlice : kLongSlice;
    const int64_t chunks = max(1, ceil_div(layer.in_features, kChunkBytes / (pairs * kTokens * 2)));
    chunk = max(slice, round_up(ceil_div(layer.in_features, chunks), slice));
    group = chunks == 1 ? 1 : max(2, kGroupSums / (pairs * kSums));
    slots = max(2, group);
  }
};

}  // namespace

int64_t packed_weights_size(const Layer& layer) { return layer.panels() * 32 * round_up(layer.in_features, kDepth); }

void pack_weights(const Layer& layer, int64_t begin, int64_t end, uint16_t* packed) {
  const int64_t depth_tiles = round_up(layer.in_features, kDepth) / kDepth, panels = layer.panels();
  for (int64_t k = begin; k < end; k += kDepth) {
    for (int64_t p = 0; p < panels; ++p) {
      char* const to = reinterpret_cast<char*>(packed) + (p * depth_tiles + k / kDepth) * (2 * kTileBytes);
      pack_weight_columns(layer, p, k, min(kDepth, end - k), to);
    }
  }
}

int64_t scratch_size(const Layer& layer, int64_t tokens) {
  const Blocking blocking(layer, tokens);
  const int64_t two_panels = 2 * blocking.pairs * kSums;
  return blocking.group == 1 ? two_panels : max(two_panels, kGroupSums);
}

void pack_tokens(const uint16_t* x, int64_t row_stride, int64_t tokens, int64_t features, uint16_t* packed,
                 const int64_t* rows_of_x) {
  for (int64_t token = 0; token < round_up(tokens, kTokens); token += kTileRows) {
    char* to = reinterpret_cast<char*>(packed + token / kTokens * packed_size(kTokens, features)) +
               token % kTokens / kTileRows * kTileBytes;
    for (int64_t k = 0; k < features; k += kDepth, to += 2 * kTileBytes) {
      __m512i rows[16] = {};
      for (int64_t r = 0; r < min(kTileRows, tokens - token); ++r) {
        const int64_t row = rows_of_x == nullptr ? token + r : rows_of_x[token + r];
        rows[r] = _mm512_maskz_loadu_epi16(first(features - k), x + row * row_stride + k);
      }
      transpose(rows);
      for (int64_t r = 0; r < 16; ++r) _mm512_store_si512(to + r * 64, rows[r]);
    }
  }
}

void pack_columns(const uint16_t* x, int64_t row_stride, int64_t tokens, int64_t features, uint16_t* packed) {
  for (int64_t k = 0; k < features; k += kDepth) {
    for (int64_t token = 0; token < tokens; token += kTokens) {
      const __mmask32 mask = first(tokens - token);
      char* to = reinterpret_cast<char*>(packed + token / kTokens * packed_size(kTokens, features)) +
                 k / kDepth * (2 * kTileBytes);
      const auto row = [&](int64_t r) {
        if (k + r >= features) return _mm512_setzero_si512();
        const uint16_t* from = x + (k + r) * row_stride + token;
        if (k + r + kDepth < features) _mm_prefetch(from + kDepth * row_stride, _MM_HINT_T1);
        return _mm512_maskz_loadu_epi16(mask, from);
      };
      const auto pairs = [&](__m256i even, __m256i odd) {
        return _mm512_or_si512(_mm512_cvtepu16_epi32(even), _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
      };
      for (int64_t r = 0; r < 16; ++r) {
        const __m512i even = row(2 * r), odd = row(2 * r + 1);
        _mm512_store_si512(to + r * 64, pairs(_mm512_castsi512_si256(even), _mm512_castsi512_si256(odd)));
        _mm512_store_si512(to + kTileBytes + r * 64,
                           pairs(_mm512_extracti64x4_epi64(even, 1), _mm512_extracti64x4_epi64(odd, 1)));
      }
    }
  }
}

void project(const Layer& layer, const uint16_t* packed, int64_t tokens, int64_t begin, int64_t end, float* scratch,
             Destination destination) {
  const auto [pairs, slice, chunk_size, group, slots] = Blocking(layer, tokens);
  const int64_t pair_bytes = packed_size(kTokens, layer.in_features) * 2;
  const int64_t depth_tiles = round_up(layer.in_features, kDepth) / kDepth;
  const int64_t ahead_rows = ceil_div(32, pairs);
  const int64_t panel_steps = pairs * max(1, ceil_div(min(layer.in_features, chunk_size), kDepth));
  const int64_t epilogue_steps = ceil_div(pairs * layer.panel_features(), panel_steps);
  alignas(64) char weights[kLongSlice / kDepth * 2 * kTileBytes];
  Epilogue epilogue = idle_epilogue(layer, tokens, destination);
  configure_tiles();
  for (int64_t group_begin = begin; group_begin < end; group_begin += group) {
    const int64_t group_end = min(group_begin + group, end);
    int64_t chunk = 0;
    do {
      const int64_t chunk_end = min(chunk + chunk_size, layer.in_features);
      for (int64_t p = group_begin; p < group_end; ++p) {
        const Panel panel(layer, p), next_panel(layer, min(p + 1, end - 1));
        const bool is_quantized = panel.is_quantized();
        const bool copies_rows = layer.packed == nullptr && panel.by_rows() && !is_quantized;
        float* sums = scratch + p % slots * pairs * kSums;
        int64_t k = chunk;
        if (pairs <= kPairsInPlace && copies_rows && panel.has_all_rows()) {
          const int64_t steps = (chunk_end - k) / kDepth;
          const char* tokens_at = reinterpret_cast<const char*>(packed) + k / kDepth * (2 * kTileBytes);
          for (int64_t pair = 0; pair < pairs; ++pair) {
            multiply_in_place(panel, pair == 0 ? &next_panel : nullptr, k, tokens_at + pair * pair_bytes, steps,
                              sums + pair * kSums, tokens - pair * kTokens > kTileRows, epilogue, epilogue_steps);
          }
          k += steps * kDepth;
        }
        for (bool once = layer.in_features == 0; k < chunk_end || once; once = false) {  // stores zeros without inputs
          const int64_t count = min(slice, chunk_end - k);
          const char* slice_at = weights;
          if (layer.packed != nullptr) {
            slice_at = reinterpret_cast<const char*>(layer.packed) + (p * depth_tiles + k / kDepth) * (2 * kTileBytes);
          } else {
            panel.pack(k, count, weights);
            finish_stores();
          }
          const bool last_of_chunk = k + count == chunk_end;
          const char* tokens_at = reinterpret_cast<const char*>(packed) + k / kDepth * (2 * kTileBytes);
          for (int64_t pair = 0; pair < pairs; ++pair) {
            const int64_t row = min(pair * ahead_rows, 32);
            const Ahead ahead{(last_of_chunk ? next_panel : panel).rows + row,
                              copies_rows ? min(ahead_rows, 32 - row) : 0, last_of_chunk ? chunk : k + count};
            multiply(slice_at, tokens_at + pair * pair_bytes, round_up(count, kDepth) / kDepth, sums + pair * kSums,
                     k > 0, tokens - pair * kTokens > kTileRows, epilogue, epilogue_steps, ahead);
          }
          k += count;
        }
        epilogue.advance(epilogue.steps);
        if (k == layer.in_features) {
          epilogue.sums = sums;
          epilogue.panel = p;
          epilogue.step = 0;
          epilogue.steps = ceil_div(tokens, kTileRows) * layer.panel_features() / 2;  // a pair of features of a tile
          if (destination.by_feature) epilogue.steps = pairs * layer.panel_features();
        }
      }
      chunk = chunk_end;
    } while (chunk < layer.in_features);
  }
  epilogue.advance(epilogue.steps);
  _tile_release();
}

}  // namespace fused_mlp::amx

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
