#include <limits>

#include "rank_rows.cuh"

namespace fused_mlp::sm90 {
namespace {

bool in_vectors(const Matrix& matrix) {
  return reinterpret_cast<uintptr_t>(matrix.data) % 16 == 0 && matrix.row_stride % 8 == 0;
}

}  // namespace

int64_t rank_rows_ctas(const RankRows& p) {
  constexpr int64_t kMost = std::numeric_limits<int>::max();
  const bool fits = p.m > 0 && p.m <= kMostRankRows && p.k > 0 && p.k % 8 == 0 && p.k <= kMost - kRankBlockK;
  if (p.dtype == DType::kFloat32 || !fits || !in_vectors(p.x)) return 0;
  for (const RankFactor& factor : p.factors) {
    if (factor.rank > 0 && !in_vectors(factor.a)) return 0;
  }
  return kRankCluster * (ceil_div(p.factors[0].rank, kClusterRanks) + ceil_div(p.factors[1].rank, kClusterRanks));
}

cudaError_t launch_rank_rows(const RankRows& p, bool starts_early, cudaStream_t stream) {
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config = {};
  config.gridDim = static_cast<unsigned>(rank_rows_ctas(p));
  config.blockDim = kRankThreads;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = starts_early ? 2 : 1;
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {kRankCluster, 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  const auto kernel = p.dtype == DType::kFloat16 ? rank_rows_kernel<__half> : rank_rows_kernel<__nv_bfloat16>;
  return cudaLaunchKernelEx(&config, kernel, p);
}

}  // namespace fused_mlp::sm90
