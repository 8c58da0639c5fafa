#include "dropped.h"
#include "dropped_rows.cuh"
#include "masked_sum.cuh"
#include "outer_factor.cuh"

namespace fused_mlp::sm90 {
namespace {

template <typename Element, int kTiles>
cudaError_t launch_rows(const DroppedRows& p, const DroppedRowsArgs& args, cudaStream_t stream) {
  const auto kernel =
      p.draw.vector == 8 ? dropped_rows_kernel<Element, kTiles, 8> : dropped_rows_kernel<Element, kTiles, 4>;
  kernel<<<static_cast<unsigned>(ceil_div(p.rows, kDroppedTile)), kDroppedThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

template <typename Element, int kTerms>
cudaError_t launch_sum(const MaskedSum& p, int multiprocessors, cudaStream_t stream) {
  constexpr int kCtasOfMultiprocessor = 4;
  const int64_t columns = ceil_div(p.cols, kMaskedThreads);
  const int64_t parts = ceil_div(kCtasOfMultiprocessor * multiprocessors, columns);
  const int64_t rows = ceil_div(ceil_div(p.rows, parts), kMaskedTile) * kMaskedTile;
  const dim3 grid(static_cast<unsigned>(columns), static_cast<unsigned>(ceil_div(p.rows, rows)));
  bool has_few_ranks = true;
  for (int i = 0; i < kTerms; ++i) has_few_ranks = has_few_ranks && p.terms[i].ranks <= kMaskedRanks;
  const auto kernel = has_few_ranks ? masked_sum_kernel<Element, kTerms, 1> : masked_sum_kernel<Element, kTerms, 2>;
  kernel<<<grid, kMaskedThreads, 0, stream>>>(p, static_cast<int>(rows));
  return cudaGetLastError();
}

template <typename Element>
cudaError_t launch_sum_of(const MaskedSum& p, int multiprocessors, cudaStream_t stream) {
  return p.count == 1 ? launch_sum<Element, 1>(p, multiprocessors, stream)
                      : launch_sum<Element, 2>(p, multiprocessors, stream);
}

template <typename Element, int kTiles>
cudaError_t launch_outer(const OuterFactor& p, int multiprocessors, cudaStream_t stream) {
  const int64_t columns = ceil_div(p.cols, kOuterColumns), ranks = ceil_div(p.ranks, kTiles * kOuterRanks);
  if (p.ranges != nullptr) {
    const dim3 grid(static_cast<unsigned>(ceil_div(columns, kOuterWarps)), static_cast<unsigned>(ranks),
                    static_cast<unsigned>(p.count));
    expert_outer_kernel<Element, kTiles><<<grid, kOuterThreads, 0, stream>>>(p);
    return cudaGetLastError();
  }
  constexpr int kCtasOfMultiprocessor = 2, kMostParts = 8;
  unsigned parts = 1;
  while (parts < kMostParts && 2 * parts * columns * ranks <= kCtasOfMultiprocessor * multiprocessors) parts *= 2;
  cudaLaunchAttribute attribute;
  cudaLaunchConfig_t config = {};
  config.gridDim = {parts, static_cast<unsigned>(columns), static_cast<unsigned>(ranks)};
  config.blockDim = kOuterThreads;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {parts, 1, 1};
  return cudaLaunchKernelEx(&config, masked_outer_kernel<Element, kTiles>, p);
}

template <typename Element>
cudaError_t launch_outer_of(const OuterFactor& p, int multiprocessors, cudaStream_t stream) {
  return p.ranks <= kOuterRanks ? launch_outer<Element, 1>(p, multiprocessors, stream)
                                : launch_outer<Element, 2>(p, multiprocessors, stream);
}

}  // namespace

cudaError_t launch_dropped_rows(const DroppedRows& p, cudaStream_t stream) {
  const uint64_t first = p.draw.offset / 4;
  DroppedRowsArgs args{.x = p.x,
                       .a = p.a,
                       .out = p.out,
                       .rows = static_cast<int>(p.rows),
                       .cols = static_cast<int>(p.cols),
                       .ranks = static_cast<int>(p.ranks),
                       .scale = p.scale,
                       .keys = {},
                       .first = static_cast<uint32_t>(first),
                       .first_high = static_cast<uint32_t>(first >> 32),
                       .last_kept = p.draw.last_kept(),
                       .threads = static_cast<uint32_t>(p.draw.threads),
                       .kept = p.kept};
  for (uint32_t round = 0; round < kPhiloxRounds; ++round) {
    args.keys[round][0] = static_cast<uint32_t>(p.draw.seed) + round * 0x9E3779B9u;
    args.keys[round][1] = static_cast<uint32_t>(p.draw.seed >> 32) + round * 0xBB67AE85u;
  }
  if (p.out.data == nullptr) return launch_rows<__nv_bfloat16, 0>(p, args, stream);
  constexpr int kFew = 2, kMost = DroppedRows::kMostRanks / kRanksOfTile;
  const bool has_few_ranks = p.ranks <= kFew * kRanksOfTile;
  if (p.dtype == DType::kFloat16) {
    return has_few_ranks ? launch_rows<__half, kFew>(p, args, stream) : launch_rows<__half, kMost>(p, args, stream);
  }
  return has_few_ranks ? launch_rows<__nv_bfloat16, kFew>(p, args, stream)
                       : launch_rows<__nv_bfloat16, kMost>(p, args, stream);
}

cudaError_t launch_masked_sum(const MaskedSum& p, int multiprocessors, cudaStream_t stream) {
  return p.dtype == DType::kFloat16 ? launch_sum_of<__half>(p, multiprocessors, stream)
                                    : launch_sum_of<__nv_bfloat16>(p, multiprocessors, stream);
}

cudaError_t launch_outer_factor(const OuterFactor& p, int multiprocessors, cudaStream_t stream) {
  return p.dtype == DType::kFloat16 ? launch_outer_of<__half>(p, multiprocessors, stream)
                                    : launch_outer_of<__nv_bfloat16>(p, multiprocessors, stream);
}

}  // namespace fused_mlp::sm90
