// Launches the kernel of a plan. Instantiated once per dtype.
#pragma once

#include <algorithm>

#include "../gemm/problem.h"
#include "../gemm/shared_memory.cuh"
#include "plan.h"
#include "streamed_gemm.cuh"
#include "tiled_gemm.cuh"

namespace fused_mlp::sm80 {

template <typename Args>
cudaError_t launch_kernel(void (*kernel)(Args), const Args& args, int64_t grid, int threads, int shared_bytes,
                          std::atomic<uint64_t>& devices_done, cudaStream_t stream) {
  const cudaError_t error = allow_shared_memory(kernel, shared_bytes, devices_done);
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config = {};
  config.gridDim = static_cast<unsigned>(grid);
  config.blockDim = static_cast<unsigned>(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, args);
}

template <typename Gemm>
cudaError_t launch_tiled(const GemmProblem& p, int multiprocessors, cudaStream_t stream) {
  TiledGemmArgs args{p.a, p.weight, p.up_weight, p.out, p.epilogue, p.training};
  args.m = static_cast<int>(p.m);
  args.n = static_cast<int>(p.n);
  args.k = static_cast<int>(p.k);
  args.tiles_m = static_cast<int>(ceil_div(p.m, Gemm::kBlockM));
  args.tiles_n = static_cast<int>(ceil_div(p.n, Gemm::kColumns));
  const int64_t tiles = int64_t{args.tiles_m} * args.tiles_n;
  static std::atomic<uint64_t> devices_done{0};
  return launch_kernel(tiled_gemm_kernel<Gemm>, args,
                       Gemm::kPersistent ? std::min<int64_t>(tiles, multiprocessors) : tiles, Gemm::kThreads,
                       Gemm::kSharedBytes, devices_done, stream);
}

template <typename Gemm>
cudaError_t launch_streamed(const GemmProblem& p, int multiprocessors, cudaStream_t stream) {
  StreamedGemmArgs args{p.a, p.weight, p.up_weight, p.out, p.epilogue};
  args.m = static_cast<int>(p.m);
  args.n = static_cast<int>(p.n);
  args.k = static_cast<int>(p.k);
  args.tiles_m = static_cast<int>(ceil_div(p.m, Gemm::kTokens));
  args.tiles = static_cast<int>(args.tiles_m * ceil_div(p.n, Gemm::kColumns));
  static std::atomic<uint64_t> devices_done{0};
  return launch_kernel(streamed_gemm_kernel<Gemm>, args, std::min(args.tiles, multiprocessors), Gemm::Tile::kThreads,
                       Gemm::kSharedBytes, devices_done, stream);
}

// The kernels of inference, or those of training.
template <typename Element, bool kTraining>
cudaError_t launch(const GemmProblem& p, const GemmKernel& kernel, int multiprocessors, cudaStream_t stream) {
#define FUSED_MLP_STREAMED(PRODUCT, TOKENS, COLUMNS, BLOCK_K, WARPS_M, WARPS_K, STAGES)                     \
  if constexpr (!kTraining) {                                                                               \
    if (kernel == streamed(Product::k##PRODUCT, TOKENS, COLUMNS, BLOCK_K, WARPS_M, WARPS_K, STAGES).kernel) \
      return launch_streamed<                                                                               \
          StreamedGemm<Element, Product::k##PRODUCT, TOKENS, COLUMNS, BLOCK_K, WARPS_M, WARPS_K, STAGES>>(  \
          p, multiprocessors, stream);                                                                      \
  }
#define FUSED_MLP_TILED(PRODUCT, BLOCK_M, BLOCK_N, BLOCK_K, WARPS_M, WARPS_N, STAGES)                     \
  if constexpr (is_training(Product::k##PRODUCT) == kTraining) {                                          \
    if (kernel == tiled(Product::k##PRODUCT, BLOCK_M, BLOCK_N, BLOCK_K, WARPS_M, WARPS_N, STAGES).kernel) \
      return launch_tiled<                                                                                \
          TiledGemm<Element, Product::k##PRODUCT, BLOCK_M, BLOCK_N, BLOCK_K, WARPS_M, WARPS_N, STAGES>>(  \
          p, multiprocessors, stream);                                                                    \
  }
#include "kernels.def"
  return cudaErrorInvalidValue;
}

}  // namespace fused_mlp::sm80
