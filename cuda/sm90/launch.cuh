// Launches the kernel of a plan: encodes the tensor maps, sets the grid and the cluster. Instantiated once per dtype.
#pragma once

#include <algorithm>
#include <atomic>
#include <limits>

#include "../gemm/problem.h"
#include "../gemm/shared_memory.cuh"
#include "chip.h"
#include "streamed_gemm.cuh"
#include "tensor_map.h"
#include "tiled_gemm.cuh"

namespace fused_mlp::sm90 {

template <typename Args>
cudaError_t launch_kernel(void (*kernel)(Args), const Args& args, int grid, int threads, int shared_bytes, int cluster,
                          bool starts_early, cudaStream_t stream) {
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  if (cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    ++config.numAttrs;
  }
  if (starts_early) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs].val.programmaticStreamSerializationAllowed = 1;
    ++config.numAttrs;
  }
  return cudaLaunchKernelEx(&config, kernel, args);
}

template <typename Gemm>
cudaError_t launch_tiled(const GemmProblem& p, int multiprocessors, cudaStream_t stream) {
  TiledGemmArgs args;
  const int box_rows_a = p.m < Gemm::kBlockM ? static_cast<int>(p.m) : Gemm::kBlockM;
  const bool mapped = encode_tensor_map(&args.a, p.dtype, p.a, p.m, p.k, box_rows_a, Gemm::kBlockK) &&
                      encode_tensor_map(&args.weight, p.dtype, p.weight, p.n, p.k, Gemm::kBoxRowsB, Gemm::kBlockK) &&
                      (!Gemm::kGated || encode_tensor_map(&args.up_weight, p.dtype, p.up_weight, p.n, p.k,
                                                          Gemm::kBoxRowsB, Gemm::kBlockK)) &&
                      encode_tensor_map(&args.out, p.dtype, p.out, p.m, p.n, Gemm::kBoxRows, Gemm::kBoxN);
  if (!mapped) return cudaErrorInvalidValue;
  args.epilogue = p.epilogue;
  args.n = static_cast<int>(p.n);
  args.k_blocks = ceil_div(p.k, Gemm::kBlockK);
  args.stage_bytes = box_rows_a * Gemm::kBlockK * sizeof(typename Gemm::Element) + Gemm::kBytesB;
  const auto last = [](int64_t extent, int tile) { return static_cast<int>(std::max<int64_t>(extent - tile, 0)); };
  args.last_row = last(p.m, Gemm::kBlockM);
  // Where a cluster splits k, the order in which a column's parts are added depends on its place in the tile. The last
  // tile is not moved then: that would give its neighbour's results other bits.
  args.last_column = Gemm::kSplitK == 1 ? last(p.n, Gemm::kTileN) : std::numeric_limits<int>::max();
  args.tiles_m = ceil_div(p.m, Gemm::kBlockM);
  args.tiles_n = ceil_div(p.n, Gemm::kTileN);

  const auto kernel = tiled_gemm_kernel<Gemm>;
  static std::atomic<uint64_t> devices_done{0};
  const cudaError_t error = allow_shared_memory(kernel, Gemm::kSharedBytes, devices_done);
  if (error != cudaSuccess) return error;
  const int tiles = args.tiles_m * args.tiles_n;
  const int clusters = Gemm::kSplitK > 1 ? tiles : std::min(tiles, multiprocessors);
  // A tiled kernel does not start before the kernel before it is done: at large widths its CTAs, which share weights in
  // L2, took up to half as long again when they did (measured on an H100).
  return launch_kernel(kernel, args, clusters * Gemm::kSplitK, Gemm::kThreads, Gemm::kSharedBytes, Gemm::kSplitK, false,
                       stream);
}

// The shared memory to ask for, so that CTAs spread over all multiprocessors. A kernel that starts while the one before
// it drains is placed on the first multiprocessors that have room, several CTAs to each, and leaves others idle. To
// prevent that, each CTA asks for its share of a multiprocessor's shared memory, even where it needs less. Clusters of
// more than two CTAs behind a streamed kernel ask for half at most: they fit beside the CTAs that still run, and need
// not wait until enough neighbouring multiprocessors are empty.
template <typename Gemm>
int shared_bytes_to_spread(int64_t rows, int ctas, int cluster, int multiprocessors) {
  const int least = cluster > 2 && rows < kTiledRows ? 2 : 1;
  const int64_t share = std::max<int64_t>(ceil_div(ctas, usable_multiprocessors(multiprocessors, cluster)), least);
  return std::max(Gemm::kSharedBytes, Gemm::shared_limit(share));
}

template <typename Gemm>
cudaError_t launch_streamed(const GemmProblem& p, int split_k, int multiprocessors, cudaStream_t stream) {
  StreamedGemmArgs args;
  args.tiles_m = ceil_div(p.m, Gemm::kTokens);
  const int tokens = ceil_div(p.m, args.tiles_m);
  const bool mapped =
      encode_tensor_map(&args.a, p.dtype, p.a, p.m, p.k, tokens, Gemm::kBlockK) &&
      encode_tensor_map(&args.weight, p.dtype, p.weight, p.n, p.k, Gemm::kRows, Gemm::kBlockK) &&
      (!Gemm::kGated || encode_tensor_map(&args.up_weight, p.dtype, p.up_weight, p.n, p.k, Gemm::kRows, Gemm::kBlockK));
  if (!mapped) return cudaErrorInvalidValue;
  args.epilogue = p.epilogue;
  args.out = p.out.data;
  args.out_stride = p.out.row_stride;
  args.m = static_cast<int>(p.m);
  args.tokens = tokens;
  args.n = static_cast<int>(p.n);
  args.k_blocks = ceil_div(p.k, Gemm::kBlockK);
  const int ctas = args.tiles_m * ceil_div(p.n, Gemm::kRows) * split_k;
  args.starts_early = p.follows_gemm && (args.tiles_m == 1 || ctas <= multiprocessors);

  const auto kernel = streamed_gemm_kernel<Gemm>;
  static std::atomic<uint64_t> devices_done{0};
  const cudaError_t error = allow_shared_memory(kernel, Gemm::shared_limit(1), devices_done);
  if (error != cudaSuccess) return error;
  const int shared =
      args.starts_early ? shared_bytes_to_spread<Gemm>(p.m, ctas, split_k, multiprocessors) : Gemm::kSharedBytes;
  return launch_kernel(kernel, args, ctas, Gemm::kThreads, shared, split_k, args.starts_early, stream);
}

template <typename Element>
cudaError_t launch(const GemmProblem& p, const GemmKernel& kernel, int multiprocessors, cudaStream_t stream) {
#define FUSED_MLP_STREAMED(PRODUCT, BLOCK_M)                                                                        \
  if (kernel.loop == MainLoop::kStreamed && kernel.product == Product::k##PRODUCT && kernel.block_m == BLOCK_M)     \
    return launch_streamed<StreamedGemm<Element, Product::k##PRODUCT, BLOCK_M>>(p, kernel.split_k, multiprocessors, \
                                                                                stream);
#define FUSED_MLP_TILED(PRODUCT, BLOCK_M, BLOCK_N, SCHEDULE, SPLIT_K)                                                \
  if (kernel == GemmKernel{MainLoop::kTiled, Product::k##PRODUCT, BLOCK_M, BLOCK_N, Schedule::k##SCHEDULE, SPLIT_K}) \
    return launch_tiled<TiledGemm<Element, Product::k##PRODUCT, BLOCK_M, BLOCK_N, Schedule::k##SCHEDULE, SPLIT_K>>(  \
        p, multiprocessors, stream);
#include "kernels.def"
  return cudaErrorInvalidValue;
}

}  // namespace fused_mlp::sm90
