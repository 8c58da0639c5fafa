#include <algorithm>

#include "../../gemm/choice/usual.h"
#include "../../gemm/experts.h"
#include "../../sm80/launch.cuh"
#include "gemm.cuh"
#include "grouped.h"

namespace fused_mlp {
namespace {

constexpr StackKernel kKernels[] = {
#define FUSED_MLP_STACK(...) {__VA_ARGS__},
#include "kernels.def"
#undef FUSED_MLP_STACK
};

template <typename Gemm>
cudaError_t launch(const CodedExperts& p, const GroupedPlan& plan, const Gpu& gpu, cudaStream_t stream) {
  const GroupedProblem& layer = p.layer;
  const GemmProblem& g = layer.gemm;
  const bool gathers = layer.gather.token_of_row != nullptr;
  StackArgs args{};
  args.a = gathers ? layer.gather.x : g.a;
  args.weight = p.weight;
  args.out = g.out;
  args.epilogue = g.epilogue;
  args.routes = layer.routes;
  args.fitted = layer.fitted;
  args.token_of_row = layer.gather.token_of_row;
  args.limits = layer.limits;
  args.bias_stride = layer.bias_stride;
  args.bias_step = layer.bias_step;
  args.n = static_cast<int>(g.n);
  args.k = static_cast<int>(g.k);
  args.row_step = layer.interleaved ? 2 : 1;
  args.up_row = layer.interleaved ? 1 : args.n;
  args.slots_of_row = layer.slots_of_row;
  args.column_tiles = static_cast<int>(ceil_div(g.n, Gemm::kColumns));
  args.float_bias = p.float_bias;
  args.follows_sort = plan.sorts && !g.follows_ours();
  const bool early = starts_kernels_early(gpu);
  args.starts_early = early && g.follows_ours();
  constexpr int kShared = Gemm::kKernel.shared_bytes();
  const int resident = std::min(Gemm::kKernel.ctas, sm80::resident_ctas(kShared, gpu.shared_of_multiprocessor));
  const int64_t grid =
      std::min<int64_t>(int64_t{plan.row_tiles} * args.column_tiles, gpu.multiprocessors * std::max(1, resident));
  return sm80::launch_kernel<stack_gemm_kernel<Gemm>>(
      args, grid, Gemm::kThreads, kShared, args.starts_early || (early && args.follows_sort), kShared, stream);
}

}  // namespace

// Tiles that hold the usual rows of an expert, and are no larger than needed: weights are read once per tile.
GroupedPlan plan_stack(const Routes& routes) {
  const bool sorts = routes.slots() > kSearchedSlots;
  const int64_t rows = usual_rows(routes);
  int tokens = 0;
  for (const StackKernel& each : kKernels) {
    if (sorts && each.tokens < kFittedStep) continue;  // a fitted tile has whole steps
    if (tokens == 0 || (tokens < rows ? each.tokens > tokens : each.tokens >= rows && each.tokens < tokens)) {
      tokens = each.tokens;
    }
  }
  GroupedPlan plan{MainLoop::kStreamed, sorts, tokens, row_tiles(routes, tokens), 1};
  plan.sorted_rows = row_tiles(routes, kFittedStep) * kFittedStep;
  plan.fits = sorts;
  plan.gathers = sorts;
  return plan;
}

cudaError_t launch_stack(const CodedExperts& p, const GroupedPlan& plan, const Gpu& gpu, cudaStream_t stream) {
#define FUSED_MLP_STACK(...)                                                                          \
  if (constexpr StackKernel kKernel{__VA_ARGS__};                                                     \
      kKernel.coding == p.weight.coding && kKernel.gated == p.gated && kKernel.tokens == plan.rows) { \
    return launch<StackGemm<__nv_bfloat16, kKernel>>(p, plan, gpu, stream);                           \
  }
#include "kernels.def"
#undef FUSED_MLP_STACK
  return cudaErrorInvalidValue;
}

}  // namespace fused_mlp
