// Assumptions of the host about the distribution of slots over experts, before any index is read.
#pragma once

#include <algorithm>
#include <cmath>

#include "../grouped.h"

namespace fused_mlp {

// The number of rows that few experts would exceed under random routing. A token hardly ever chooses an expert twice.
inline int64_t usual_rows(const Routes& routes) {
  const double mean = static_cast<double>(routes.slots()) / routes.experts;
  return std::clamp<int64_t>(std::ceil(mean + 2.0 * std::sqrt(mean)), 1, routes.tokens);
}

// The number of experts that are chosen at all under random routing.
inline int64_t usual_experts(const Routes& routes) {
  const double missed = std::pow(1.0 - 1.0 / routes.experts, routes.slots());
  return std::clamp<int64_t>(std::ceil(routes.experts * (1.0 - missed)), 1, std::max(routes.slots(), 1));
}

// The maximum number of tiles of rows.
inline int row_tiles(const Routes& routes, int tile) {
  const int64_t lacking =
      std::min<int64_t>(routes.experts, routes.slots()) * (tile - 1);  // rows of partly filled tiles
  return static_cast<int>((routes.slots() + lacking) / tile);
}

}  // namespace fused_mlp
