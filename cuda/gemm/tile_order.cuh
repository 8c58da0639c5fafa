// The order in which CTAs process the tiles of an output whose rows all have the same weights.
#pragma once

#include <cuda_runtime.h>

namespace fused_mlp {

// The tile row (x) and the tile column (y) of a tile.
//
// Tiles are grouped by kGroupM tile rows, so that the tiles in flight at any time share few rows of a and of the
// weights in L2. A single tile row left over joins the group before: alone it would read all the weights again.
template <int kGroupM>
__device__ __forceinline__ int2 grouped_tile(int index, int tiles_m, int tiles_n) {
  const int last = max(tiles_m - 2, 0) / kGroupM;
  const int group = min(index / (kGroupM * tiles_n), last);
  const int rows = group == last ? tiles_m - last * kGroupM : kGroupM;
  const int in_group = index - group * kGroupM * tiles_n;
  return {group * kGroupM + in_group % rows, in_group / rows};
}

}  // namespace fused_mlp
