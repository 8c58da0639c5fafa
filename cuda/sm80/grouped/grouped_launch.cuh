// Launches the grouped kernel of a plan. Instantiated once per dtype.
#pragma once

#include <algorithm>

#include "../../gemm/experts.h"
#include "../launch.cuh"
#include "grouped.cuh"

namespace fused_mlp::sm80 {

template <typename Gemm, typename Args>
Args grouped_args(const GroupedProblem& p, const GroupedPlan& plan, int columns) {
  const GemmProblem& g = p.gemm;
  const bool gathers = p.gather.token_of_row != nullptr;
  Args args{};
  args.a = gathers ? p.gather.x : g.a;
  args.weight = g.weight;
  args.up_weight = g.up_weight;
  args.out = g.out;
  args.epilogue = g.epilogue;
  args.n = static_cast<int>(g.n);
  args.k = static_cast<int>(g.k);
  args.routes = p.routes;
  args.fitted = p.fitted;
  args.token_of_row = p.gather.token_of_row;
  args.limits = p.limits;
  args.weight_stride = p.weight_rows * g.weight.row_stride;
  args.bias_stride = p.bias_stride;
  args.bias_step = p.bias_step;
  args.slots_of_row = p.slots_of_row;
  args.column_tiles = static_cast<int>(ceil_div(g.n, columns));
  args.interleaved = p.interleaved;
  args.follows_sort = plan.sorts && !g.follows_ours();
  return args;
}

template <typename Gemm>
cudaError_t launch_grouped_streamed(const GroupedProblem& p, const GroupedPlan& plan, const Gpu& gpu,
                                    cudaStream_t stream) {
  auto args = grouped_args<Gemm, GroupedStreamedArgs>(p, plan, Gemm::kColumns);
  const int ctas = gpu.multiprocessors * std::max(1, streamed_ctas(Gemm::kShape, gpu.shared_of_multiprocessor));
  const int64_t grid = std::min<int64_t>(int64_t{plan.row_tiles} * args.column_tiles, ctas);
  const bool early = starts_kernels_early(gpu);
  args.starts_early = early && p.gemm.follows_ours();
  return launch_kernel<grouped_streamed_kernel<Gemm>>(args, grid, Gemm::Tile::kThreads, Gemm::kSharedBytes,
                                                      args.starts_early || (early && args.follows_sort),
                                                      Gemm::kSharedBytes, stream);
}

template <typename Gemm>
cudaError_t launch_grouped_tiled(const GroupedProblem& p, const GroupedPlan& plan, const Gpu& gpu,
                                 cudaStream_t stream) {
  const auto args = grouped_args<Gemm, GroupedTiledArgs>(p, plan, Gemm::kColumns);
  return launch_kernel<grouped_tiled_kernel<Gemm>>(args, int64_t{plan.row_tiles} * args.column_tiles, Gemm::kThreads,
                                                   Gemm::kSharedBytes, starts_kernels_early(gpu), Gemm::kSharedBytes,
                                                   stream);
}

template <typename Element>
cudaError_t launch_grouped(const GroupedProblem& p, const GroupedPlan& plan, const Gpu& gpu, cudaStream_t stream) {
#define FUSED_MLP_GROUPED_STREAMED(PRODUCT, ROWS, ...)                                                             \
  if (plan.loop == MainLoop::kStreamed && p.gemm.product() == Product::k##PRODUCT && plan.rows == ROWS)            \
    return launch_grouped_streamed<GroupedStreamed<Element, Product::k##PRODUCT, ROWS, __VA_ARGS__>>(p, plan, gpu, \
                                                                                                     stream);
#define FUSED_MLP_GROUPED_TILED(PRODUCT, TRANSPOSED, ROWS, ...)                                                 \
  if (plan.loop == MainLoop::kTiled && p.gemm.product() == Product::k##PRODUCT && p.transposed == TRANSPOSED && \
      plan.rows == ROWS) {                                                                                      \
    using Gemm = GroupedTiled<Element, Product::k##PRODUCT, TRANSPOSED, ROWS, __VA_ARGS__>;                     \
    if (resident_ctas(Gemm::kSharedBytes, gpu.shared_of_multiprocessor) >= 2)                                   \
      return launch_grouped_tiled<Gemm>(p, plan, gpu, stream);                                                  \
  }
#include "grouped.def"
  return cudaErrorInvalidValue;
}

}  // namespace fused_mlp::sm80
