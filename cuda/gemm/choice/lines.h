// The units in which memory is read, and whether the rows of a product's operands are whole ones; the choice of a
// kernel depends on this.
#pragma once

#include "../problem.h"

namespace fused_mlp {

constexpr int64_t kSectorBytes = 32, kLineBytes = 128;  // a request is for a line, or for some of its sectors

inline bool rows_fill(const GemmProblem& p, int64_t bytes) {
  const auto fill = [&](const Matrix& matrix) {
    constexpr int64_t kElementBytes = 2;
    const auto begin = reinterpret_cast<uintptr_t>(matrix.data);
    return begin % bytes == 0 && matrix.row_stride * kElementBytes % bytes == 0;
  };
  return fill(p.a) && fill(p.weight) && fill(p.up_weight) && fill(p.training.second_a) &&
         fill(p.training.second_weight) && fill(p.training.third_a) && fill(p.training.third_weight);
}

}  // namespace fused_mlp
