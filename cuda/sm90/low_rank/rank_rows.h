// Products of few rows with an adapter's few weight rows, which torch's GEMMs take longer for than they read.
#pragma once

#include <cuda_runtime_api.h>

#include "../../gemm/problem.h"

namespace fused_mlp::sm90 {

constexpr int kMostRankRows = 64;

// The CTAs of the kernel, or 0 where it does not take the operands: 16-bit elements in rows that begin at 16 bytes.
int64_t rank_rows_ctas(const RankRows& product);

// `starts_early`: the kernel before is one of ours, and did not write a.
cudaError_t launch_rank_rows(const RankRows& product, bool starts_early, cudaStream_t stream);

}  // namespace fused_mlp::sm90
