#pragma once

#include <optional>

#include "matrix.h"

namespace fused_mlp {

// The codes of a weight: indices of 16 values, two per byte, the first in the high half; or 0 to 15 minus the zero
// point of their block, the first in the low half; or e4m3, or int8; or 0 to 15 in tensor-core tiles.
enum class Coding { kFourBits, kInt4, kFp8, kInt8, kInt4Tiles };

constexpr bool in_bytes(Coding coding) { return coding == Coding::kFp8 || coding == Coding::kInt8; }

// A checked quantised weight [n, k] without tensors. ops/quantized.h defines its operands: code is null except for
// 4-bit values, and the nested fields are null if scales are not nested.
struct PackedWeight {
  Coding coding;
  int32_t device;
  const void *data, *scales;
  const float *code, *nested_scales, *nested_code;
  int64_t n, k, block_rows, block, nested_block;
  double offset;

  static constexpr int64_t kFastSums = 2;  // the nested_block of an FP8 weight whose products may sum with fewer bits

  bool blocked() const { return coding != Coding::kFourBits; }
  bool in_tiles() const { return coding == Coding::kInt4Tiles; }
  bool adds_fast() const { return coding == Coding::kFp8 && nested_block == kFastSums; }
  bool nested() const { return nested_scales != nullptr; }
  float factor() const {
    return coding == Coding::kInt8 ? 1.0f / static_cast<float>(nested_block) : 1.0f;
  }  // of scales
  int64_t elements() const { return n * k; }
  int64_t blocks_of_row() const { return ceil_div(k, block); }  // if these are
  int64_t blocks() const { return blocked() ? ceil_div(n, block_rows) * blocks_of_row() : ceil_div(elements(), block); }
  int64_t bytes() const { return in_bytes(coding) ? elements() : blocked() ? elements() / 2 : ceil_div(elements(), 2); }
};

// Int4 in tiles, whose rows and columns are padded to whole tiles (ops/quantized.h).
struct Tiles {
  static constexpr int kRows = 8, kColumns = 128, kLanes = 32, kWords = 4;  // per tile; per lane
  int64_t n, k;                                                             // with the padding

  explicit Tiles(const PackedWeight& weight) : n(ceil_div(weight.n, int64_t{kRows}) * kRows), k(weight.nested_block) {}
  int64_t words() const { return n * k / 8; }
};

// The first or the second half of the rows of a weight; nothing if a block, or one of nested scales, crosses the
// middle.
inline std::optional<PackedWeight> half_of(const PackedWeight& both, bool second) {
  const int64_t n = both.n / 2, elements = n * both.k;
  if (both.n % 2 != 0 || elements % 2 != 0 || both.in_tiles()) return {};
  const auto behind = [](const void* data, int64_t bytes) -> const void* {
    return static_cast<const char*>(data) + bytes;
  };
  PackedWeight half = both;
  half.n = n;
  int64_t blocks = 0;  // in the first half
  if (both.blocked() && both.block_rows < both.n) {
    if (n % both.block_rows != 0) return {};
    blocks = n / both.block_rows * both.blocks_of_row();
  } else if (!both.blocked()) {
    blocks = elements / both.block;
    if (elements % (2 * both.block) != 0 || (both.nested() && blocks % both.nested_block != 0)) return {};
  }
  if (!second) return half;
  half.data = behind(both.data, in_bytes(both.coding) ? elements : elements / 2);
  half.scales = behind(both.scales, both.nested() ? blocks : blocks * static_cast<int64_t>(sizeof(float)));
  if (both.nested()) half.nested_scales += blocks / both.nested_block;
  return half;
}

}  // namespace fused_mlp
