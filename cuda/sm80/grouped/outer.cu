// Launches the outer products of experts in training.
#include "../launch.cuh"
#include "outer.cuh"
#include "outer.h"

namespace fused_mlp::sm80 {
namespace {

template <typename Element>
cudaError_t launch(const GroupedProblem& p, const Gpu& gpu, cudaStream_t stream) {
  using Gemm = OuterGemm<Element>;
  const GemmProblem& g = p.gemm;
  OuterArgs args{};
  args.a = g.a;
  args.weight = g.weight;
  args.out = g.out;
  args.epilogue.activation = static_cast<int64_t>(Activation::kLinear);
  args.m = static_cast<int>(g.m);
  args.n = static_cast<int>(g.n);
  args.tiles_m = static_cast<int>(ceil_div(g.m, Gemm::kBlockM));
  args.tiles_n = static_cast<int>(ceil_div(g.n, Gemm::kColumns));
  args.rows = p.blocks.rows;
  args.tiles = p.training.experts * args.tiles_m * args.tiles_n;
  const int ctas = Gemm::kCtasPerMultiprocessor * gpu.multiprocessors;
  return launch_kernel<outer_kernel<Gemm>>(args, std::min(args.tiles, ctas), Gemm::kThreads, Gemm::kSharedBytes, false,
                                           Gemm::kSharedBytes, stream);
}

}  // namespace

cudaError_t launch_outer(const GroupedProblem& p, const Gpu& gpu, cudaStream_t stream) {
  return p.gemm.dtype == DType::kFloat16 ? launch<__half>(p, gpu, stream) : launch<__nv_bfloat16>(p, gpu, stream);
}

}  // namespace fused_mlp::sm80
