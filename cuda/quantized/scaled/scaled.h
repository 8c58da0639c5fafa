// Products of two operands of e4m3 with scales, for many rows on Hopper: rows of x are rounded in groups of
// kScaledGroup columns, each under a scale of its own.
#pragma once

#include <cuda_runtime_api.h>

#include "../choice.h"

namespace fused_mlp {

constexpr int kScaledGroup = 128;
constexpr int64_t kScaledRows = 256;

// Rows of e4m3, `row_bytes` apart, a multiple of 16. The scale of group g of row r is scales[g * scale_stride + r]; a
// group has places for scale_stride rows, a multiple of kScaledRows.
struct ScaledRows {
  uint8_t* data = nullptr;
  float* scales = nullptr;
  int64_t row_bytes = 0, scale_stride = 0;
};

// Rows of several experts: sorted, so that every block of kScaledTile rows has those of one. Lists are those that a
// RowSort writes; a problem's weights are those of the first expert, and its m the most rows that there can be.
struct ScaledExperts {
  int experts = 0;  // none where all rows have the same weights
  const int* codes = nullptr;
  const int* count = nullptr;
  const int* token_of_row = nullptr;              // where rows of a are those of tokens, and not sorted
  int64_t weight_rows = 0, scales_of_expert = 0;  // from an expert to the next one
  int* taken = nullptr;                           // the tiles that CTAs have taken behind their first: 0 at first
};

constexpr int kScaledTile = 128;

// Multiplies `a`, which stands for problem.a. The result is rounded to `rounded` where that has data, as x is, and else
// goes to problem.out. Where the plan splits k, parts has room for [split, m, n] sums, and nothing is rounded. Starts
// early behind the kernel that wrote a, which must be one of these. Rows of tokens are gathered.
cudaError_t launch_scaled(const CodedProblem& problem, const CodedPlan& plan, const ScaledRows& a,
                          const ScaledRows& rounded, float* parts, const Gpu& gpu, cudaStream_t stream,
                          const ScaledExperts& experts = {});

// Rounds problem.a, whose data and stride are whole vectors of 16 bytes. It may start early behind a kernel that writes
// none of it.
cudaError_t launch_rounding(const CodedProblem& problem, const ScaledRows& rounded, bool starts_early,
                            cudaStream_t stream);

}  // namespace fused_mlp
