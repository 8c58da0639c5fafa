// Products of two e4m3 operands with scales, for many rows on Hopper: rows of x are rounded in groups of kScaledGroup
// columns, and each group has its own scale.
#pragma once

#include <cuda_runtime_api.h>

#include "../choice.h"

namespace fused_mlp {

constexpr int kScaledGroup = 128;
constexpr int64_t kScaledRows = 256;

// Rows of e4m3, `row_bytes` apart, a multiple of 16. The scale of group g of row r is scales[g * scale_stride + r]; a
// group has room for scale_stride rows, a multiple of kScaledRows.
struct ScaledRows {
  uint8_t* data = nullptr;
  float* scales = nullptr;
  int64_t row_bytes = 0, scale_stride = 0;
};

// Rows of several experts, sorted so that every block of kScaledTile rows belongs to one. A RowSort writes the lists. A
// problem's weights are those of the first expert, and its m is the maximum number of rows.
struct ScaledExperts {
  int experts = 0;  // 0 if all rows have the same weights
  const int* codes = nullptr;
  const int* count = nullptr;
  const int* token_of_row = nullptr;              // if rows of a are tokens, and not sorted
  int64_t weight_rows = 0, scales_of_expert = 0;  // distance from one expert to the next
  int* taken = nullptr;                           // the number of tiles taken by CTAs after their first: 0 at first
};

constexpr int kScaledTile = 128;

// Multiplies `a`, which replaces problem.a. The result is rounded to `rounded` if that has data, like x, and otherwise
// goes to problem.out. If the plan splits k, `parts` has room for [split, m, n] sums, and nothing is rounded. Starts
// early after the kernel that wrote a, which must be one of these. Rows of tokens are gathered.
cudaError_t launch_scaled(const CodedProblem& problem, const CodedPlan& plan, const ScaledRows& a,
                          const ScaledRows& rounded, float* parts, const Gpu& gpu, cudaStream_t stream,
                          const ScaledExperts& experts = {});

// Rounds problem.a, whose data and stride are whole 16-byte vectors. It may start early after a kernel that writes none
// of it.
cudaError_t launch_rounding(const CodedProblem& problem, const ScaledRows& rounded, bool starts_early,
                            cudaStream_t stream);

}  // namespace fused_mlp
