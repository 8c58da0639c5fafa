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

// Multiplies `a`, which stands for problem.a. The result is rounded to `rounded` where that has data, as x is, and else
// goes to problem.out. Where the plan splits k, parts has room for [split, m, n] sums, and nothing is rounded. Starts
// early behind the kernel that wrote a, which must be one of these.
cudaError_t launch_scaled(const CodedProblem& problem, const CodedPlan& plan, const ScaledRows& a,
                          const ScaledRows& rounded, float* parts, const Gpu& gpu, cudaStream_t stream);

// Rounds problem.a, whose data and stride are whole vectors of 16 bytes.
cudaError_t launch_rounding(const CodedProblem& problem, const ScaledRows& rounded, cudaStream_t stream);

}  // namespace fused_mlp
