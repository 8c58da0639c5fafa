#pragma once

#include <cstdint>

#include "copy_rows.h"

namespace fused_mlp {

constexpr int kCopyThreads = 128, kCopyWidth = 8;

// A CTA writes a row in 16-byte vectors, which are filled by two-byte reads: neighbouring threads read from the same L1
// cache lines, whatever the alignment of the two rows.
inline __global__ void copy_rows_kernel(RowsCopy copy) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kCopyThreads + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kCopyThreads;
  for (int64_t row = blockIdx.y; row < copy.rows; row += gridDim.y) {
    const auto* from = static_cast<const uint16_t*>(copy.from.data) + row * copy.from.row_stride;
    auto* to = static_cast<uint16_t*>(copy.to.data) + row * copy.to.row_stride;
    const int64_t readable = row < copy.from_rows ? copy.from_columns : 0;
    // Vector 0 ends at the first 16-byte boundary after the row's start, and most of it lies outside this row.
    const int64_t lead = (16 - reinterpret_cast<uintptr_t>(to) % 16) / sizeof(uint16_t);
    for (int64_t begin = lead + (first - 1) * kCopyWidth; begin < copy.columns; begin += step * kCopyWidth) {
      alignas(16) uint16_t values[kCopyWidth];
#pragma unroll
      for (int i = 0; i < kCopyWidth; ++i) {
        const int64_t column = begin + i;
        values[i] = column >= 0 && column < readable ? from[column] : uint16_t{0};
      }
      if (begin >= 0 && begin + kCopyWidth <= copy.columns) {
        *reinterpret_cast<uint4*>(to + begin) = *reinterpret_cast<const uint4*>(values);
        continue;
      }
#pragma unroll
      for (int i = 0; i < kCopyWidth; ++i) {
        if (begin + i >= 0 && begin + i < copy.columns) to[begin + i] = values[i];
      }
    }
  }
}

}  // namespace fused_mlp
