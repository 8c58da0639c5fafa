// Products of few rows with an adapter's few weight rows. torch's GEMMs take longer for them than reading the data.
#pragma once

#include <cuda_runtime_api.h>

#include "../../gemm/problem.h"

namespace fused_mlp::sm90 {

constexpr int kMostRankRows = 64;

// Returns the number of CTAs of the kernel, or 0 if it does not support the operands: rows of 16-bit elements that
// begin at multiples of 16 bytes.
int64_t rank_rows_ctas(const RankRows& product);

// `starts_early`: the preceding kernel is one of ours, and did not write a.
cudaError_t launch_rank_rows(const RankRows& product, bool starts_early, cudaStream_t stream);

}  // namespace fused_mlp::sm90
