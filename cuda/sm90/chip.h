// What the launches and the model of their times both know of the chip and of the main loops.
#pragma once

#include <cstdint>

namespace fused_mlp::sm90 {

constexpr int kBlockK = 64;            // elements of k that a stage of shared memory holds
constexpr int kStreamedColumns = 64;   // columns of the output in a streamed kernel's tile
constexpr int kMaxStreamedSplitK = 8;  // CTAs that share a streamed tile's k: 1, 2, 4 or 8

// Tiled kernels are chosen from this many rows on: with fewer, most of a tile would be empty.
constexpr int64_t kTiledRows = 33;

// How many CTAs of a streamed kernel, by the rows of its tiles, a multiprocessor holds at once.
constexpr int streamed_ctas(int rows) { return rows < 32 ? 3 : 2; }

// The multiprocessors on which clusters of this many CTAs find room. A cluster lies within one GPC, and the GPCs have
// 16 or 18 multiprocessors each (H100 SXM): about a tenth of the chip is left over by clusters of 4 or 8.
constexpr int usable_multiprocessors(int multiprocessors, int cluster) {
  return cluster <= 2 ? multiprocessors : multiprocessors * 10 / 11;
}

}  // namespace fused_mlp::sm90
