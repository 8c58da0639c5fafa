// Launches the grouped products of many rows with MXFP4 weights.
#include "../../gemm/shared_memory.cuh"
#include "../../sm90/grouped/grouped.h"
#include "../../sm90/launch.cuh"
#include "fitted_stack.cuh"
#include "grouped.h"

namespace fused_mlp {
namespace {

template <typename Gemm>
cudaError_t launch(const CodedExperts& p, const GroupedPlan& plan, const Gpu& gpu, cudaStream_t stream) {
  const GroupedProblem& layer = p.layer;
  const GemmProblem& g = layer.gemm;
  FittedStackArgs args{};
  sm90::FittedGemmArgs& gemm = args.gemm;
  bool mapped = sm90::encode_tensor_map(&gemm.out, g.dtype, g.out, plan.sorted_rows, g.n, Gemm::kBoxRows, Gemm::kBoxN);
  for (int box = 0; box < sm90::kFittedBoxes; ++box) {
    mapped = mapped && sm90::encode_tensor_map(&gemm.a[box], g.dtype, g.a, plan.sorted_rows, g.k, kFittedStep << box,
                                               Gemm::kBlockK);
  }
  if (!mapped) return cudaErrorInvalidValue;
  gemm.epilogue = g.epilogue;
  gemm.limits = layer.limits;
  gemm.fitted = layer.fitted;
  gemm.n = static_cast<int>(g.n);
  gemm.k_blocks = gemm.own_blocks = static_cast<int>(ceil_div(g.k, Gemm::kBlockK));
  gemm.last_column = static_cast<int>(std::max<int64_t>(g.n - Gemm::kTileN, 0));
  gemm.tiles_n = static_cast<int>(ceil_div(g.n, Gemm::kTileN));
  gemm.bias_stride = layer.bias_stride;
  gemm.bias_step = layer.bias_step;
  gemm.float_bias = p.float_bias;
  gemm.follows_sort = !g.follows_ours();
  gemm.starts_early = g.follows_ours();
  args.weight = p.weight;
  args.row_step = layer.interleaved ? 2 : 1;
  args.up_row = layer.interleaved ? 1 : gemm.n;
  constexpr auto kKernel = fitted_stack_kernel<Gemm>;
  const cudaError_t error = allow_shared_memory<kKernel>(Gemm::kSharedBytes);
  if (error != cudaSuccess) return error;
  return sm90::launch_kernel(kKernel, args, gpu.multiprocessors, Gemm::kThreads, Gemm::kSharedBytes, 1, true, stream);
}

}  // namespace

GroupedPlan plan_fitted_stack(const Routes& routes) { return sm90::plan_tiles(routes, kFittedStep); }

cudaError_t launch_fitted_stack(const CodedExperts& p, const GroupedPlan& plan, const Gpu& gpu, cudaStream_t stream) {
  return p.gated ? launch<FittedStack<Product::kGated>>(p, plan, gpu, stream)
                 : launch<FittedStack<Product::kPlain>>(p, plan, gpu, stream);
}

}  // namespace fused_mlp
