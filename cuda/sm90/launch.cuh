// Launches the kernel of a plan: encodes the tensor maps, sets the grid and the cluster. Instantiated once per dtype.
#pragma once

#include <algorithm>
#include <limits>

#include "../gemm/problem.h"
#include "../gemm/shared_memory.cuh"
#include "chip.h"
#include "dense/streamed_gemm.cuh"
#include "dense/tiled_gemm.cuh"
#include "tensor_map.h"

namespace fused_mlp::sm90 {

template <typename Args>
cudaError_t launch_kernel(void (*kernel)(Args), const Args& args, dim3 grid, int threads, int shared_bytes, int cluster,
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

// Describes to the TMA what products of training have besides.
template <typename Gemm>
bool encode_training_maps(const GemmProblem& p, int box_rows_a, TrainingGemmArgs* args) {
  const TrainingMatrices& t = p.training;
  if (Gemm::kPair) {
    args->term_blocks = ceil_div(p.k, Gemm::kBlockK);
    const auto encode_term = [&](CUtensorMap* a, CUtensorMap* weight, const Matrix& its_a, const Matrix& its_weight) {
      return its_weight.data == nullptr ||
             (encode_tensor_map(a, p.dtype, its_a, p.m, p.k, box_rows_a, Gemm::kBlockK) &&
              encode_tensor_map(weight, p.dtype, its_weight, p.k, p.n, Gemm::kBoxRowsB, 64));
    };
    return encode_term(&args->second_a, &args->second_weight, t.second_a, t.second_weight) &&
           encode_term(&args->third_a, &args->third_weight, t.third_a, t.third_weight);
  }
  args->stores_value = p.out.data != nullptr;
  const auto encode = [&](CUtensorMap* map, const Matrix& matrix, int box_rows = Gemm::kBoxRows) {
    return encode_tensor_map(map, p.dtype, matrix, p.m, p.n, box_rows, Gemm::kBoxN);
  };
  const int kept_rows = Gemm::kGradient ? Gemm::kSlotRows : Gemm::kBoxRows;
  const bool has_up = Gemm::kGated || Gemm::kOfUp;
  return encode(&args->gate, t.gate, kept_rows) && (!has_up || encode(&args->up, t.up, kept_rows)) &&
         (!Gemm::kGradient || encode(&args->gate_gradient, t.gate_gradient)) &&
         (!Gemm::kOfUp || encode(&args->up_gradient, t.up_gradient));
}

// The distance between the beginnings of the tiles of few rows, so that their number fills whole rounds, where there
// are several. They overlap then, and compute some columns twice; but where a round waits for memory, it has less to
// wait for: what two tiles load at about the same time is read once.
template <typename Gemm>
int even_step(int64_t n, int tiles_m, int multiprocessors) {
  const int64_t tiles_n = ceil_div(n, Gemm::kTileN);
  const int64_t room = ceil_div(tiles_m * tiles_n, multiprocessors) * multiprocessors / tiles_m;
  if (tiles_m * tiles_n <= multiprocessors || tiles_m * Gemm::kBlockM > kEvenRows) return Gemm::kTileN;
  constexpr int kUnit = 8;
  return static_cast<int>(ceil_div(n - Gemm::kTileN, (room - 1) * kUnit) * kUnit);
}

template <typename Gemm>
cudaError_t launch_tiled(const GemmProblem& p, const GemmKernel& chosen, int multiprocessors, cudaStream_t stream) {
  if constexpr (Gemm::kGradient && !kMayBeMasked<Gemm>) {
    if (p.low_rank.kept != nullptr) return launch_tiled<Masked<Gemm>>(p, chosen, multiprocessors, stream);
  }
  typename Gemm::Args args;
  const int box_rows_a = p.m < Gemm::kShareM ? static_cast<int>(p.m) : Gemm::kShareM;
  const int64_t weight_rows = Gemm::kTransposed ? p.k : p.n, weight_cols = Gemm::kTransposed ? p.n : p.k;
  bool mapped = encode_tensor_map(&args.a, p.dtype, p.a, p.m, p.k, box_rows_a, Gemm::kBlockK) &&
                encode_tensor_map(&args.weight, p.dtype, p.weight, weight_rows, weight_cols, Gemm::kBoxRowsB, 64) &&
                (!Gemm::kGated ||
                 encode_tensor_map(&args.up_weight, p.dtype, p.up_weight, p.n, p.k, Gemm::kBoxRowsB, Gemm::kBlockK));
  if (p.out.data != nullptr)
    mapped = mapped && encode_tensor_map(&args.out, p.dtype, p.out, p.m, p.n, Gemm::kBoxRows, Gemm::kBoxN);
  if constexpr (is_training(Gemm::kProduct)) mapped = mapped && encode_training_maps<Gemm>(p, box_rows_a, &args);
  mapped = mapped && encode_low_rank(p, box_rows_a, Gemm::kBoxRowsB, &args.low_rank) &&
           (p.low_rank.kept == nullptr || kMayBeMasked<Gemm>) && args.low_rank.loaded_ranks == 0;
  if (!mapped) return cudaErrorInvalidValue;
  args.epilogue = p.epilogue;
  args.n = static_cast<int>(p.n);
  args.own_blocks = ceil_div(p.k, Gemm::kBlockK) * (Gemm::kPair ? p.terms() : 1);
  args.k_blocks = args.own_blocks + low_rank_blocks(p);
  args.stage_bytes = Gemm::kSplitK * box_rows_a * Gemm::kBlockK * sizeof(typename Gemm::Element) + Gemm::kBytesB;
  const auto last = [](int64_t extent, int tile) { return static_cast<int>(std::max<int64_t>(extent - tile, 0)); };
  // A gradient may be written over what it is made of: no tile may read what its neighbour writes.
  constexpr int kNotMoved = std::numeric_limits<int>::max();
  args.last_row = Gemm::kGradient ? kNotMoved : last(p.m, Gemm::kShareM);
  args.last_column = Gemm::kGradient ? kNotMoved : last(p.n, Gemm::kTileN);
  args.tiles_m = ceil_div(p.m, Gemm::kBlockM);
  args.step_column = kSpreadsTiles<Gemm> ? even_step<Gemm>(p.n, args.tiles_m, multiprocessors) : Gemm::kTileN;
  args.tiles_n = 1 + ceil_div(std::max<int64_t>(p.n - Gemm::kTileN, 0), args.step_column);

  constexpr auto kKernel = tiled_gemm_kernel<Gemm>;
  const cudaError_t error = allow_shared_memory<kKernel>(Gemm::kSharedBytes);
  if (error != cudaSuccess) return error;
  const int tiles = args.tiles_m * args.tiles_n;
  const int clusters = Gemm::kSplitK > 1 ? tiles : std::min(tiles, multiprocessors);
  args.starts_early = starts_early(p, chosen, multiprocessors);
  return launch_kernel(kKernel, args, clusters * Gemm::kSplitK, Gemm::kThreads, Gemm::kSharedBytes, Gemm::kSplitK,
                       args.starts_early, stream);
}

// Into how many parts a multiprocessor's shared memory is to be cut, so that CTAs spread over all multiprocessors. A
// kernel that starts while the one before it drains is placed on the first multiprocessors that have room, several CTAs
// to each, and leaves others idle. To prevent that, each CTA asks for its share of a multiprocessor's shared memory,
// even where it needs less.
inline int64_t ctas_to_spread(int ctas, int cluster, int multiprocessors) {
  return ceil_div(ctas, usable_multiprocessors(multiprocessors, cluster));
}

// The same for a streamed kernel, whose ring takes up all of a CTA's share.
template <typename Gemm>
int64_t parts_of_shared_memory(const StreamedGemmArgs& args, int ctas, int cluster, int64_t weight_bytes,
                               int multiprocessors) {
  int64_t parts = ctas_to_spread(ctas, cluster, multiprocessors);
  if (args.starts_early) {
    // Clusters are placed where the kernel before leaves neighbours free. Where they would fill the chip by two CTAs to
    // a multiprocessor, the last find none, and run when the others are done: the MLP took up to 1.2 of the time on an
    // H200. So there is room for a third.
    const int64_t free = parts * usable_multiprocessors(multiprocessors, cluster) - ctas;
    if (cluster > 2 && parts > 1 && free <= cluster) ++parts;
  } else if (args.m < kTiledRows && weight_bytes / (ctas / args.tiles_m) <= kSmallStreamedCta) {
    parts = std::max<int64_t>(parts, 2);
  }
  return std::min<int64_t>(parts, Gemm::kCtasPerMultiprocessor);
}

template <typename Gemm>
cudaError_t launch_streamed(const GemmProblem& p, const GemmKernel& chosen, int multiprocessors, cudaStream_t stream) {
  StreamedGemmArgs args;
  args.tiles_m = ceil_div(p.m, Gemm::kTokens);
  const int ranks = rows_of_factor(p);
  args.columns = chosen.columns();
  const int tokens = ceil_div(p.m, args.tiles_m);
  const auto map_weight = [&](CUtensorMap* map, const Matrix& weight) {
    return encode_tensor_map(map, p.dtype, weight, p.n, p.k, args.columns, Gemm::kBlockK);
  };
  const bool mapped = encode_tensor_map(&args.a, p.dtype, p.a, p.m, p.k, tokens, Gemm::kBlockK) &&
                      map_weight(&args.weight, p.weight) &&
                      (!Gemm::kGated || map_weight(&args.up_weight, p.up_weight)) &&
                      encode_low_rank(p, tokens, args.columns, &args.low_rank) && (ranks == 0 || Gemm::kMakesRows);
  if (!mapped) return cudaErrorInvalidValue;
  args.epilogue = p.epilogue;
  args.out = p.out.data;
  args.out_stride = p.out.row_stride;
  args.m = static_cast<int>(p.m);
  args.tokens = tokens;
  args.n = static_cast<int>(p.n);
  args.own_blocks = ceil_div(p.k, Gemm::kBlockK);
  args.k_blocks = args.own_blocks + low_rank_blocks(p);
  const int cluster = chosen.split_k;
  const int ctas = args.tiles_m * ceil_div(p.n, args.columns) * cluster;
  args.starts_early = starts_early(p, chosen, multiprocessors);
  const int64_t weight_bytes = int64_t{Gemm::kParts} * p.n * p.k * sizeof(typename Gemm::Element);
  args.reads_once = args.tiles_m == 1 && weight_bytes > kPassingBytes;
  const int shared =
      Gemm::shared_limit(parts_of_shared_memory<Gemm>(args, ctas, cluster, weight_bytes, multiprocessors));
  args.blocks_together = blocks_together(p);
  // The most that one CTA takes.
  const int most_blocks = ceil_div(args.k_blocks, args.blocks_together * cluster) * args.blocks_together;
  args.stages = std::min(Gemm::stages(args.columns, ranks, shared), most_blocks);

  constexpr auto kKernel = streamed_gemm_kernel<Gemm>;
  const cudaError_t error = allow_shared_memory<kKernel>(Gemm::shared_limit(1));
  if (error != cudaSuccess) return error;
  return launch_kernel(kKernel, args, ctas, Gemm::kThreads, shared, cluster, args.starts_early, stream);
}

#define FUSED_MLP_LAUNCH_TILED(PRODUCT, BLOCK_M, BLOCK_N, SCHEDULE, SPLIT_K)                                         \
  if (kernel == GemmKernel{MainLoop::kTiled, Product::k##PRODUCT, BLOCK_M, BLOCK_N, Schedule::k##SCHEDULE, SPLIT_K}) \
    return launch_tiled<TiledGemm<Element, Product::k##PRODUCT, BLOCK_M, BLOCK_N, Schedule::k##SCHEDULE, SPLIT_K>>(  \
        p, kernel, multiprocessors, stream);

template <typename Element>
cudaError_t launch(const GemmProblem& p, const GemmKernel& kernel, int multiprocessors, cudaStream_t stream) {
#define FUSED_MLP_STREAMED(PRODUCT, BLOCK_M, COLUMNS)                                                                \
  if (kernel.loop == MainLoop::kStreamed && kernel.product == Product::k##PRODUCT && kernel.block_m == BLOCK_M &&    \
      kernel.columns() <= COLUMNS)                                                                                   \
    return launch_streamed<StreamedGemm<Element, Product::k##PRODUCT, BLOCK_M, COLUMNS>>(p, kernel, multiprocessors, \
                                                                                         stream);
#define FUSED_MLP_TILED FUSED_MLP_LAUNCH_TILED
#define FUSED_MLP_TRAINING(...)
#include "plan/kernels.def"
  return cudaErrorInvalidValue;
}

// The same for the products of training.
template <typename Element>
cudaError_t launch_training(const GemmProblem& p, const GemmKernel& kernel, int multiprocessors, cudaStream_t stream) {
#define FUSED_MLP_STREAMED(...)
#define FUSED_MLP_TILED(...)
#define FUSED_MLP_TRAINING FUSED_MLP_LAUNCH_TILED
#include "plan/kernels.def"
  return cudaErrorInvalidValue;
}

#undef FUSED_MLP_LAUNCH_TILED

}  // namespace fused_mlp::sm90
