#pragma once

#include "../parallel.h"

namespace fused_mlp {

// Applies a norm, as norm.h defines it, to rows of x and of the residual, in parallel. `out` may be x. `statistics` is
// null, or memory for the values that norm_forward returns for each row.
inline void norm_rows(const PointwiseShape& shape, const Norm& norm, const Matrix& x, const Matrix& residual,
                      const Matrix& out, float* statistics = nullptr) {
  if (shape.rows == 0 || shape.cols == 0) return;
  torch::stable::parallel_for(0, shape.rows, ceil_div(kGrain, shape.cols), [&](int64_t begin, int64_t end) {
    const auto from = [&](const Matrix& rows) {
      return rows.data == nullptr ? rows : from_row(rows, begin, shape.dtype);
    };
    pointwise().norm({shape.dtype, end - begin, shape.cols}, norm, begin, from(x), from(residual), from(out),
                     statistics == nullptr ? RowStatistics{} : RowStatistics{statistics, statistics + shape.rows});
  });
}

}  // namespace fused_mlp
