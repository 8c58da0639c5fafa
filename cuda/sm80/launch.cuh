// Launches the kernel of a plan. Instantiated once per dtype.
#pragma once

#include <algorithm>

#include "../gemm/problem.h"
#include "../gemm/shared_memory.cuh"
#include "dense/streamed_gemm.cuh"
#include "dense/tiled_gemm.cuh"
#include "plan/plan.h"

namespace fused_mlp::sm80 {

template <auto kKernel, typename Args>
cudaError_t launch_kernel(const Args& args, int64_t grid, int threads, int shared_bytes, bool starts_early,
                          int most_shared_bytes, cudaStream_t stream) {
  const cudaError_t error = allow_shared_memory<kKernel>(std::max(shared_bytes, most_shared_bytes));
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config = {};
  config.gridDim = static_cast<unsigned>(grid);
  config.blockDim = static_cast<unsigned>(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  config.numAttrs = starts_early ? 1 : 0;
  return cudaLaunchKernelEx(&config, kKernel, args);
}

template <typename Gemm>
cudaError_t launch_tiled(const GemmProblem& p, const Gpu& gpu, cudaStream_t stream) {
  TiledGemmArgs args{p.a, p.weight, p.up_weight, p.out, p.epilogue, p.training};
  args.m = static_cast<int>(p.m);
  args.n = static_cast<int>(p.n);
  args.k = static_cast<int>(p.k);
  args.tiles_m = static_cast<int>(ceil_div(p.m, Gemm::kBlockM));
  args.tiles_n = static_cast<int>(ceil_div(p.n, Gemm::kColumns));
  const int64_t tiles = int64_t{args.tiles_m} * args.tiles_n;
  const int64_t ctas = Gemm::kPersistent ? std::min<int64_t>(tiles, gpu.multiprocessors) : tiles;
  return launch_kernel<tiled_gemm_kernel<Gemm>>(args, ctas, Gemm::kThreads, Gemm::kSharedBytes, false,
                                                gpu.shared_of_cta, stream);
}

template <typename Gemm>
cudaError_t launch_streamed(const GemmProblem& p, const Gpu& gpu, cudaStream_t stream) {
  StreamedGemmArgs args{p.a, p.weight, p.up_weight, p.out, p.epilogue};
  args.m = static_cast<int>(p.m);
  args.n = static_cast<int>(p.n);
  args.k = static_cast<int>(p.k);
  args.tiles_m = static_cast<int>(ceil_div(p.m, Gemm::kTokens));
  args.tiles = static_cast<int>(args.tiles_m * ceil_div(p.n, Gemm::kColumns));
  const int ctas = gpu.multiprocessors * std::max(1, streamed_ctas(Gemm::kShape, gpu.shared_of_multiprocessor));
  const int grid = std::min(args.tiles, ctas);
  args.starts_early = starts_early(p, Gemm::kShape, grid, gpu);
  // CTAs that start while the kernel before drains take all of their share of a multiprocessor's shared memory:
  // otherwise the first multiprocessors to have room would get several, and others none.
  const int share = gpu.shared_of_multiprocessor / static_cast<int>(ceil_div(grid, gpu.multiprocessors)) - kSystemBytes;
  const int shared = args.starts_early ? std::max(Gemm::kSharedBytes, share) : Gemm::kSharedBytes;
  return launch_kernel<streamed_gemm_kernel<Gemm>>(args, grid, Gemm::Tile::kThreads, shared, args.starts_early,
                                                   gpu.shared_of_cta, stream);
}

// The kernels of inference, or those of training.
template <typename Element, bool kTraining>
cudaError_t launch(const GemmProblem& p, const GemmKernel& kernel, const Gpu& gpu, cudaStream_t stream) {
#define FUSED_MLP_STREAMED(PRODUCT, ...)                                                               \
  if constexpr (!kTraining) {                                                                          \
    if (kernel == streamed(Product::k##PRODUCT, __VA_ARGS__).kernel)                                   \
      return launch_streamed<StreamedGemm<Element, Product::k##PRODUCT, __VA_ARGS__>>(p, gpu, stream); \
  }
#define FUSED_MLP_TILED(PRODUCT, ...)                                                            \
  if constexpr (is_training(Product::k##PRODUCT) == kTraining) {                                 \
    if (kernel == tiled(Product::k##PRODUCT, __VA_ARGS__).kernel)                                \
      return launch_tiled<TiledGemm<Element, Product::k##PRODUCT, __VA_ARGS__>>(p, gpu, stream); \
  }
#include "plan/kernels.def"
  return cudaErrorInvalidValue;
}

}  // namespace fused_mlp::sm80
