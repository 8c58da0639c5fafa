// Launches the kernels of the experts of a mixture. Instantiated once per dtype.
#pragma once

#include "../dense/fitted_gemm.cuh"
#include "../launch.cuh"
#include "grouped_gemm.cuh"
#include "grouped_rows.h"
#include "grouped_tiles.cuh"

namespace fused_mlp::sm90 {

// The shared memory of a CTA, such that CTAs spread evenly (ctas_to_spread). Clusters of more than two CTAs that
// compute few rows request at most half of a multiprocessor's: they fit beside CTAs of the previous kernel, and need
// not wait until enough neighbouring multiprocessors are empty.
template <typename Gemm>
int shared_bytes_to_spread(int64_t rows, int ctas, int cluster, int multiprocessors) {
  const int least = cluster > 2 && rows < kTiledRows ? 2 : 1;
  const int64_t parts = std::max<int64_t>(ctas_to_spread(ctas, cluster, multiprocessors), least);
  return std::max(Gemm::kSharedBytes, Gemm::shared_limit(parts));
}

// Describes to the TMA the weights [n, k] of a grouped product's low-rank term, in boxes of this many rows.
inline bool encode_rank_weights(const GroupedProblem& p, int box_rows, CUtensorMap* weight, CUtensorMap* up_weight) {
  const GemmProblem& g = p.gemm;
  const LowRank& term = g.low_rank;
  const int64_t groups = p.low_rank_of_slots ? p.routes.slots() : p.routes.experts;
  const auto encode = [&](CUtensorMap* map, const Matrix& matrix) {
    return encode_tensor_map(map, g.dtype, matrix, (groups - 1) * p.low_rank_rows + g.n, term.k, box_rows, kBlockK);
  };
  return encode(weight, term.weight) && (!g.gated() || encode(up_weight, term.up_weight));
}

template <typename Gemm>
cudaError_t launch_tiles(const GroupedProblem& p, const GroupedPlan& plan, int multiprocessors, cudaStream_t stream) {
  const GemmProblem& g = p.gemm;
  constexpr int kRowsBytes = sizeof(GroupRows<Gemm::kTokens>);
  static_assert(Gemm::kSharedBytes + kRowsBytes <= Gemm::kSharedLimit, "as many CTAs as the ring was cut for");
  GroupedGemmArgs args{};
  const int64_t groups = p.of_slots ? p.routes.slots() : p.routes.experts;
  const int64_t rows_of_weights = (groups - 1) * p.weight_rows + (Gemm::kTransposed ? g.k : g.n);
  const int64_t columns_of_weights = Gemm::kTransposed ? Gemm::kParts * g.n : g.k;
  static_assert(Gemm::kRows == Gemm::kBlockK, "boxes of weights are as high as they are wide, transposed or not");
  const auto map_weight = [&](CUtensorMap* map, const Matrix& weight) {
    return encode_tensor_map(map, g.dtype, weight, rows_of_weights, columns_of_weights, Gemm::kRows, Gemm::kBlockK);
  };
  const int64_t rows = plan.sorts ? plan.sorted_rows : p.routes.slots() / p.slots_of_row;
  args.box_rows = plan.sorts ? kSortedBoxRows : 1;
  const bool mapped = encode_tensor_map(&args.gemm.a, g.dtype, g.a, rows, g.k, args.box_rows, Gemm::kBlockK) &&
                      map_weight(&args.gemm.weight, g.weight) &&
                      (!Gemm::kGated || map_weight(&args.gemm.up_weight, g.up_weight));
  if (!mapped) return cudaErrorInvalidValue;
  if (g.low_rank) {
    LowRankArgs& term = args.gemm.low_rank;
    const int64_t rank_rows = plan.sorts ? rows : p.routes.slots();
    if (!Gemm::kTakesLowRank || !encode_rank_weights(p, Gemm::kRows, &term.weight, &term.up_weight) ||
        !encode_tensor_map(&term.rows, g.dtype, g.low_rank.rows, rank_rows, g.low_rank.k, args.box_rows, Gemm::kBlockK))
      return cudaErrorInvalidValue;
  }
  args.gemm.epilogue = g.epilogue;
  args.gemm.out = g.out.data;
  args.gemm.out_stride = g.out.row_stride;
  args.gemm.n = static_cast<int>(g.n);
  args.gemm.own_blocks = ceil_div(g.k, Gemm::kBlockK);
  args.gemm.k_blocks = args.gemm.own_blocks + ceil_div(g.low_rank.k, Gemm::kBlockK);
  args.gemm.blocks_together = !Gemm::kTransposed && rows_are_whole_pieces(g) ? kMostBlocksTogether : 1;
  args.gemm.starts_early = g.follows_ours();
  args.routes = p.routes;
  args.limits = p.limits;
  args.blocks = p.blocks;
  args.follows_sort = plan.sorts && !g.follows_ours();
  args.interleaved = p.interleaved;
  args.slots_of_row = p.slots_of_row;
  args.weight_rows = static_cast<int>(p.weight_rows);
  args.rank_weight_rows = static_cast<int>(p.low_rank_rows);
  args.of_slots = p.of_slots;
  args.rank_of_slots = p.low_rank_of_slots;
  args.bias_stride = p.bias_stride;
  args.bias_step = p.bias_step;
  args.tiles_n = ceil_div(g.n, Gemm::kRows);

  constexpr auto kKernel = grouped_gemm_kernel<Gemm>;
  const cudaError_t error = allow_shared_memory<kKernel>(Gemm::shared_limit(1) - kRowsBytes);
  if (error != cudaSuccess) return error;
  const int ctas = plan.row_tiles * args.tiles_n * plan.split_k;
  // Few CTAs have longer rings, except after a GEMM: then they start while it still runs.
  const int busy = g.follows_ours() ? Gemm::kCtasPerMultiprocessor : std::max<int>(ceil_div(ctas, multiprocessors), 3);
  const int ring = Gemm::shared_limit(std::min(busy, Gemm::kCtasPerMultiprocessor)) - kRowsBytes;
  args.gemm.stages = (ring - Gemm::kAlignment) / (Gemm::kStageBytes + 16);
  const int spread = shared_bytes_to_spread<Gemm>(plan.rows, ctas, plan.split_k, multiprocessors) - kRowsBytes;
  const int shared = g.follows_ours() ? std::max(ring, spread) : ring;
  return launch_kernel(kKernel, args, ctas, Gemm::kThreads, shared, plan.split_k, g.follows_ours() || args.follows_sort,
                       stream);
}

// The position at which the last tile may start.
inline int last_tile(int64_t extent, int tile) { return static_cast<int>(std::max<int64_t>(extent - tile, 0)); }

template <typename Gemm>
cudaError_t launch_persistent(const typename Gemm::Args& args, int64_t tiles, int multiprocessors,
                              cudaStream_t stream) {
  constexpr auto kKernel = tiled_gemm_kernel<Gemm>;
  const cudaError_t error = allow_shared_memory<kKernel>(Gemm::kSharedBytes);
  if (error != cudaSuccess) return error;
  return launch_kernel(kKernel, args, static_cast<int>(std::min<int64_t>(tiles, multiprocessors)), Gemm::kThreads,
                       Gemm::kSharedBytes, 1, false, stream);
}

// Products of inference with many tokens, and the first layer of training.
template <typename Gemm>
cudaError_t launch_fitted(const GroupedProblem& p, const GroupedPlan& plan, int multiprocessors, cudaStream_t stream) {
  const GemmProblem& g = p.gemm;
  const int64_t rows = plan.sorted_rows;
  FittedGemmArgs args{};
  const int64_t rows_of_weights = (p.routes.experts - 1) * p.weight_rows + g.n;
  const auto map_weight = [&](CUtensorMap* map, const Matrix& weight) {
    return encode_tensor_map(map, g.dtype, weight, rows_of_weights, g.k, Gemm::kTileN, Gemm::kBlockK);
  };
  bool mapped = map_weight(&args.weight, g.weight) && (!Gemm::kGated || map_weight(&args.up_weight, g.up_weight)) &&
                encode_tensor_map(&args.out, g.dtype, g.out, rows, g.n, Gemm::kBoxRows, Gemm::kBoxN);
  if constexpr (Gemm::kKept) {
    for (auto [map, matrix] : {std::pair{&args.gate, g.training.gate}, std::pair{&args.up, g.training.up}}) {
      mapped = mapped && encode_tensor_map(map, g.dtype, matrix, rows, g.n, Gemm::kBoxRows, Gemm::kBoxN);
    }
  }
  for (int box = 0; box < kFittedBoxes; ++box) {
    mapped = mapped && (Gemm::kGathers ||
                        encode_tensor_map(&args.a[box], g.dtype, g.a, rows, g.k, kFittedStep << box, Gemm::kBlockK));
    mapped = mapped && (!g.low_rank || encode_tensor_map(&args.rank_rows[box], g.dtype, g.low_rank.rows, rows,
                                                         g.low_rank.k, kFittedStep << box, Gemm::kBlockK));
  }
  if (g.low_rank) {
    mapped = mapped && !Gemm::kGathers && encode_rank_weights(p, Gemm::kTileN, &args.rank_weight, &args.rank_up_weight);
  }
  if (!mapped) return cudaErrorInvalidValue;
  args.epilogue = g.epilogue;
  args.limits = p.limits;
  args.fitted = p.fitted;
  args.gather = p.gather;
  args.n = static_cast<int>(g.n);
  args.own_blocks = ceil_div(g.k, Gemm::kBlockK);
  args.k_blocks = args.own_blocks + ceil_div(g.low_rank.k, Gemm::kBlockK);
  args.last_column = last_tile(g.n, Gemm::kTileN);
  args.tiles_n = ceil_div(g.n, Gemm::kTileN);
  args.weight_rows = static_cast<int>(p.weight_rows);
  args.rank_weight_rows = static_cast<int>(p.low_rank_rows);
  args.bias_stride = p.bias_stride;
  args.bias_step = p.bias_step;
  args.follows_sort = plan.few_rows && !g.follows_ours();
  args.starts_early = plan.few_rows && g.follows_ours();
  args.reads_once = plan.few_rows && g.gated();
  args.blocks_together = plan.few_rows && rows_are_whole_pieces(g) ? kMostBlocksTogether : 1;

  constexpr auto kKernel = fitted_gemm_kernel<Gemm>;
  const cudaError_t error = allow_shared_memory<kKernel>(Gemm::kSharedBytes);
  if (error != cudaSuccess) return error;
  return launch_kernel(kKernel, args, multiprocessors, Gemm::kThreads, Gemm::kSharedBytes, 1, plan.few_rows, stream);
}

// Products of training that read weights in transposed layout.
template <typename Gemm>
cudaError_t launch_blocks(const GroupedProblem& p, const GroupedPlan& plan, int multiprocessors, cudaStream_t stream) {
  const GemmProblem& g = p.gemm;
  typename Gemm::Args args{};
  const int64_t rows = plan.sorted_rows;
  const auto map_weights = [&](CUtensorMap* map, const Matrix& weight, int64_t weight_rows, int64_t k) {
    return encode_tensor_map(map, g.dtype, MatrixStack{weight, p.routes.experts, weight_rows}, k, g.n, Gemm::kBoxRowsB,
                             64);
  };
  const auto map_rows = [&](CUtensorMap* map, int box_rows) {
    return encode_tensor_map(map, g.dtype, g.a, rows, g.k, box_rows, Gemm::kBlockK);
  };
  bool mapped = map_rows(&args.a, Gemm::kBoxRowsA) && map_rows(&args.whole_a, Gemm::kBlockM) &&
                map_weights(&args.weight, g.weight, p.weight_rows, g.k) &&
                encode_tensor_map(&args.out, g.dtype, g.out, rows, g.n, Gemm::kBoxRows, Gemm::kBoxN);
  if constexpr (Gemm::kGradient) {
    GemmProblem of_rows = g;
    of_rows.m = rows;
    mapped = mapped && encode_training_maps<Gemm>(of_rows, Gemm::kBoxRowsA, &args);
  }
  if (g.low_rank) {
    const auto map_rank_rows = [&](CUtensorMap* map, int box_rows) {
      return encode_tensor_map(map, g.dtype, g.low_rank.rows, rows, g.low_rank.k, box_rows, Gemm::kBlockK);
    };
    mapped = mapped && map_rank_rows(&args.low_rank.rows, Gemm::kBoxRowsA) &&
             map_rank_rows(&args.whole_rank_rows, Gemm::kBlockM) &&
             map_weights(&args.low_rank.weight, g.low_rank.weight, p.low_rank_rows, g.low_rank.k);
  }
  if (!mapped) return cudaErrorInvalidValue;
  args.epilogue = g.epilogue;
  args.n = static_cast<int>(g.n);
  args.own_blocks = ceil_div(g.k, Gemm::kBlockK);
  args.k_blocks = args.own_blocks + ceil_div(g.low_rank.k, Gemm::kBlockK);
  args.last_row = std::numeric_limits<int>::max();
  args.last_column = Gemm::kGradient ? std::numeric_limits<int>::max() : last_tile(g.n, Gemm::kTileN);
  args.tiles_m = ceil_div(rows, Gemm::kBlockM);
  args.tiles_n = ceil_div(g.n, Gemm::kTileN);
  args.blocks = p.blocks;
  args.bias_stride = p.bias_stride;
  args.training = p.training;
  return launch_persistent<Gemm>(args, int64_t{args.tiles_m} * args.tiles_n, multiprocessors, stream);
}

// Every expert's outer product of the rows of a, [rows, m], and of `weight`, [rows, n]: out is [experts, m, n].
template <typename Gemm>
cudaError_t launch_outer(const GroupedProblem& p, int64_t rows, int multiprocessors, cudaStream_t stream) {
  const GemmProblem& g = p.gemm;
  typename Gemm::Args args{};
  const MatrixStack out{g.out, p.training.experts, g.m};
  const bool mapped = encode_tensor_map(&args.a, g.dtype, g.a, rows, g.m, Gemm::kBlockK, 64) &&
                      encode_tensor_map(&args.weight, g.dtype, g.weight, rows, g.n, Gemm::kBoxRowsB, 64) &&
                      encode_tensor_map(&args.out, g.dtype, out, g.m, g.n, Gemm::kBoxRows, Gemm::kBoxN);
  if (!mapped) return cudaErrorInvalidValue;
  args.n = static_cast<int>(g.n);
  args.last_row = last_tile(g.m, Gemm::kBlockM);
  args.last_column = last_tile(g.n, Gemm::kTileN);
  args.tiles_m = ceil_div(g.m, Gemm::kBlockM);
  args.tiles_n = ceil_div(g.n, Gemm::kTileN);
  args.blocks = p.blocks;
  args.training = p.training;
  return launch_persistent<Gemm>(args, int64_t{args.training.experts} * args.tiles_m * args.tiles_n, multiprocessors,
                                 stream);
}

template <typename Element>
cudaError_t launch_grouped(const GroupedProblem& p, const GroupedPlan& plan, int multiprocessors, cudaStream_t stream) {
  if (plan.loop == MainLoop::kTiled) {
    if (p.gather.token_of_row != nullptr) {
      return launch_fitted<FittedGemm<Element, Product::kGated, true>>(p, plan, multiprocessors, stream);
    }
    return p.gemm.gated() ? launch_fitted<FittedGemm<Element, Product::kGated>>(p, plan, multiprocessors, stream)
                          : launch_fitted<FittedGemm<Element, Product::kPlain>>(p, plan, multiprocessors, stream);
  }
#define FUSED_MLP_LAUNCH_GROUPED(GEMM, PRODUCT, ROWS)                                               \
  if (p.transposed == GEMM<Element, Product::k##PRODUCT, ROWS>::kTransposed && plan.rows == ROWS && \
      p.gemm.product() == Product::k##PRODUCT)                                                      \
    return launch_tiles<GEMM<Element, Product::k##PRODUCT, ROWS>>(p, plan, multiprocessors, stream);
#define FUSED_MLP_LAUNCH(ROWS)                       \
  FUSED_MLP_LAUNCH_GROUPED(GroupedGemm, Plain, ROWS) \
  FUSED_MLP_LAUNCH_GROUPED(GroupedGemm, Gated, ROWS)
  FUSED_MLP_GROUPED_ROWS(FUSED_MLP_LAUNCH)
#undef FUSED_MLP_LAUNCH
#define FUSED_MLP_LAUNCH(ROWS)                             \
  FUSED_MLP_LAUNCH_GROUPED(GroupedTransposed, Plain, ROWS) \
  FUSED_MLP_LAUNCH_GROUPED(GroupedTransposed, Gated, ROWS)
  FUSED_MLP_TRANSPOSED_ROWS(FUSED_MLP_LAUNCH)
#undef FUSED_MLP_LAUNCH
#undef FUSED_MLP_LAUNCH_GROUPED
  return cudaErrorInvalidValue;
}

// The products of training, in the tiles of a plan for many tokens.
template <typename Element>
cudaError_t launch_grouped_training(const GroupedProblem& p, const GroupedPlan& plan, int multiprocessors,
                                    cudaStream_t stream) {
  if (p.outer) {
    return launch_outer<OuterTiles<Element>>(p, plan.sorted_rows, multiprocessors, stream);
  }
  switch (p.gemm.kind) {
    case Product::kGatedKept:
      return launch_fitted<FittedGemm<Element, Product::kGatedKept>>(p, plan, multiprocessors, stream);
    case Product::kGatedGradient:
      return launch_blocks<GroupedTiles<Element, Product::kGatedGradient, 192>>(p, plan, multiprocessors, stream);
    case Product::kPair:
      return launch_blocks<GroupedTiles<Element, Product::kPair, 192>>(p, plan, multiprocessors, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace fused_mlp::sm90
