// The GEMM for many rows. A CTA is persistent: its producer warp keeps a ring of shared memory stages filled by TMA,
// and its two consumer warpgroups multiply by wgmma. The consumers take a tile each in turn (ping-pong: one runs its
// epilogue while the other has the tensor cores), or share every tile (the other schedules).
//
// The wgmma's M side is a multiple of 64. Where a tile has 128 rows of a, they are the M side. For other numbers of
// rows, as many as fill the chip best, the operands swap places: weight rows are the M side, and rows of a are the N
// side.
//
// A gated product is a plain one whose B tile comes from two tensors: gate rows are its first half, up rows its second.
// Accumulators i and i + kBlockN / 4 of a thread then belong to gate and up of one output element; swapped, these are
// accumulators i of its first and of its second wgmma.
//
// The weights of a product of training that reads them as they lie are N-major operands. A pair of products is one
// whose k runs through the first, and then through the second; there may be a third, or the first alone.
#pragma once

#include "../../overlap.cuh"
#include "../ptx.cuh"
#include "../ring.cuh"
#include "../training/gradient_store.cuh"
#include "../wgmma.cuh"
#include "swapped_store.cuh"
#include "tiled_layout.cuh"
#include "tiled_store.cuh"

namespace fused_mlp::sm90 {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Loads a stage of weights that lie [k, n]: the columns of n from the tile's first one on. Of grouped rows they are
// those of an expert, behind whose k zeros follow.
template <typename Gemm>
__device__ __forceinline__ void load_weights_as_they_lie(const CUtensorMap* weight, uint32_t full, uint32_t b, int k,
                                                         int first_column, int expert = 0) {
#pragma unroll
  for (int box = 0; box < Gemm::kBoxesB; ++box) {
    const uint32_t to = b + box * (Gemm::kBytesB / Gemm::kBoxesB);
    if constexpr (Gemm::kGrouped && !Gemm::kOuter) {
      tma_load_of(expert, weight, full, to, first_column + box * 64, k);
    } else {
      tma_load(weight, full, to, first_column + box * 64, k);
    }
  }
}

// Loads a stage of an outer product: 64 rows of k, of the columns of a and of weights that the tile has.
template <typename Gemm, typename Tile>
__device__ __forceinline__ void load_columns(const typename Gemm::Args& args, uint32_t full, uint32_t a, uint32_t b,
                                             int k, const Tile& tile) {
  constexpr int kBoxes = Gemm::kBlockM / 64;
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) {
    tma_load(&args.a, full, a + box * (Gemm::kBytesA / kBoxes), tile.row + box * 64, k);
  }
  load_weights_as_they_lie<Gemm>(&args.weight, full, b, k, tile.column);
}

// Loads a stage's weight rows.
template <typename Gemm>
__device__ __forceinline__ void load_weights(const typename Gemm::Args& args, uint32_t full, uint32_t b, int column,
                                             int row) {
  tma_load(&args.weight, full, b, column, row);
  if (Gemm::kGated) tma_load(&args.up_weight, full, b + Gemm::kBytesB / 2, column, row);
}

// The first row of a of the share that a CTA of a cluster finishes. A share that would pass the last row begins
// earlier, as tiles do.
template <typename Gemm, typename Tile>
__device__ __forceinline__ int row_of_share(const typename Gemm::Args& args, const Tile& tile, int rank) {
  return Gemm::kSplitK == 1 ? tile.row : min(tile.row + rank * Gemm::kShareM, args.last_row);
}

// Loads a stage's rows of a. Where a cluster splits k, a CTA puts the rows that it finishes first, and those of the
// following ranks behind them.
template <typename Gemm, typename Tile>
__device__ __forceinline__ void load_rows(const typename Gemm::Args& args, const CUtensorMap& rows, uint32_t full,
                                          uint32_t a, int column, const Tile& tile, int rank) {
#pragma unroll
  for (int share = 0; share < Gemm::kSplitK; ++share) {
    const int row = row_of_share<Gemm>(args, tile, (share + rank) % Gemm::kSplitK);
    tma_load(&rows, full, a + share * (Gemm::kBytesA / Gemm::kSplitK), column, row);
  }
}

// Fills the ring with blocks [k.x, k.y) of a tile, as many as there is room for: with weights, and with rows of a when
// the kernel that writes these is done. Returns the number of blocks.
template <typename Gemm, typename Tile>
__device__ __forceinline__ int fill_early(const typename Gemm::Args& args, const TiledGemmShared<Gemm>& shared,
                                          const Tile& tile, int2 k, int rank) {
  const int blocks = min(Gemm::kStages, min(k.y, args.own_blocks) - k.x);
  for (int stage = 0; stage < blocks; ++stage) {
    mbarrier_arrive_expect(shared.full(stage), args.stage_bytes);
    load_weights<Gemm>(args, shared.full(stage), shared.b(stage), (k.x + stage) * Gemm::kBlockK, tile.weight_row());
  }
  wait_for_previous_kernel();
  for (int stage = 0; stage < blocks; ++stage) {
    load_rows<Gemm>(args, args.a, shared.full(stage), shared.a(stage), (k.x + stage) * Gemm::kBlockK, tile, rank);
  }
  return blocks;
}

// Loads a stage's rows of a of a tile of grouped rows. One large box is faster than four of the same rows.
template <typename Gemm, typename Tile>
__device__ __forceinline__ void load_filled_rows(const CUtensorMap* whole, const CUtensorMap* rows, uint32_t full,
                                                 uint32_t a, int column, const Tile& tile) {
  if (tile.template loaded_rows<Gemm>() == Gemm::kBlockM) {
    tma_load(whole, full, a, column, tile.row);
    return;
  }
  for (int row = 0; row < tile.filled_rows; row += Gemm::kBoxRowsA) {
    tma_load(rows, full, a + row * Gemm::kBlockK * sizeof(typename Gemm::Element), column, tile.row + row);
  }
}

// Loads a stage of the low-rank term, by the number of its block.
template <typename Gemm, typename Tile>
__device__ __forceinline__ void load_low_rank(const typename Gemm::Args& args, uint32_t full, uint32_t a, uint32_t b,
                                              int block, const Tile& tile, int rank) {
  const LowRankArgs& term = args.low_rank;
  if constexpr (Gemm::kTransposed) {
    const bool of_up = Gemm::kPair && block >= term.blocks;
    const int k = (of_up ? block - term.blocks : block) * Gemm::kBlockK;
    tma_load(&term.rows, full, a, of_up ? term.up_shift + k : k, tile.row);
    load_weights_as_they_lie<Gemm>(of_up ? &term.up_weight : &term.weight, full, b, k, tile.column);
  } else {
    const int column = block * Gemm::kBlockK;
    load_rows<Gemm>(args, term.rows, full, a, column, tile, rank);
    tma_load(&term.weight, full, b, column + term.shift, tile.weight_row());
    if (Gemm::kGated) tma_load(&term.up_weight, full, b + Gemm::kBytesB / 2, column + term.up_shift, tile.weight_row());
  }
}

// True if the low-rank term is masked by a dropout: its blocks come first then, so that nothing else is masked.
template <typename Gemm>
__device__ __forceinline__ bool is_masked(const typename Gemm::Args& args) {
  if constexpr (Gemm::kMasked) {
    return true;
  } else if constexpr (kMayBeMasked<Gemm>) {
    return args.low_rank.kept != nullptr;
  } else {
    return false;
  }
}

// Sets the sums to zero that a dropout has dropped, and scales the others. A tile begins at a whole word of a row.
template <typename Gemm, typename Tile>
__device__ __forceinline__ void mask_sums(const LowRankArgs& term, Accumulator<Gemm>& accumulator, const Tile& tile,
                                          int warp_row) {
  static_assert(Gemm::kTileN % 32 == 0);
  const int lane = threadIdx.x % 32, first_word = tile.column / 32;
#pragma unroll
  for (int mma = 0; mma < Gemm::kMmas; ++mma) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = min(tile.row + warp_row + mma * 64 + half * 8 + lane / 4, term.rows_of_mask - 1);
      const uint32_t* const words = term.kept + int64_t{row} * term.words_of_row;
#pragma unroll
      for (int word = 0; word < Gemm::kTileN / 32; ++word) {
        const uint32_t bits = words[min(first_word + word, term.words_of_row - 1)] >> lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          float& sum = accumulator[mma][(word * 4 + i / 2) * 4 + half * 2 + i % 2];
          sum = bits >> (i / 2 * 8 + i % 2) & 1 ? sum * term.scale : 0.0f;
        }
      }
    }
  }
}

template <typename Gemm>
__device__ __forceinline__ void produce(const typename Gemm::Args& args, const TiledGemmShared<Gemm>& shared,
                                        int rank) {
  const auto tiles = tile_order(args);
  int2 k = k_range<Gemm>(rank, args.k_blocks);
  RingPosition at(Gemm::kStages);
  for (int index = blockIdx.x / Gemm::kSplitK; index < tiles.count(); index += gridDim.x / Gemm::kSplitK) {
    const auto tile = tiles.template tile<Gemm>(index);
    if constexpr (Gemm::kOuter) k = {0, tile.k_blocks};
    int first = k.x;
    if constexpr (kMayStartEarly<Gemm>) {
      if (args.starts_early) {  // and has a single tile
        first += fill_early<Gemm>(args, shared, tile, k, rank);
        at.skip(first - k.x);
      }
    }
    [[maybe_unused]] const auto produce_low_rank = [&](int first_block) {
#pragma unroll 1
      for (int block = first_block; block < k.y; ++block, at.advance()) {
        const uint32_t full = shared.full(at.stage);
        mbarrier_wait(shared.empty(at.stage), at.parity ^ 1);
        mbarrier_arrive_expect(full, args.stage_bytes);
        load_low_rank<Gemm>(args, full, shared.a(at.stage), shared.b(at.stage), block - args.own_blocks, tile, rank);
      }
    };
    if constexpr (kMayBeMasked<Gemm>) {
      if (is_masked<Gemm>(args)) produce_low_rank(args.own_blocks);
    }
    const int last = Gemm::kOuter || Gemm::kGrouped ? k.y : min(k.y, args.own_blocks);
    for (int block = first; block < last; ++block, at.advance()) {
      const uint32_t full = shared.full(at.stage);
      mbarrier_wait(shared.empty(at.stage), at.parity ^ 1);
      if constexpr (Gemm::kOuter) {
        mbarrier_arrive_expect(full, Gemm::kStageBytes);
      } else if constexpr (Gemm::kGrouped) {
        mbarrier_arrive_expect(full, tile.template loaded_bytes<Gemm>());
      } else {
        mbarrier_arrive_expect(full, args.stage_bytes);
      }
      if constexpr (Gemm::kOuter) {
        load_columns<Gemm>(args, full, shared.a(at.stage), shared.b(at.stage), tile.first_k + block * Gemm::kBlockK,
                           tile);
      } else if constexpr (Gemm::kTransposed && Gemm::kGrouped) {
        const bool of_term = block >= args.own_blocks;
        const int column = (of_term ? block - args.own_blocks : block) * Gemm::kBlockK;
        load_filled_rows<Gemm>(of_term ? &args.whole_rank_rows : &args.whole_a, of_term ? &args.low_rank.rows : &args.a,
                               full, shared.a(at.stage), column, tile);
        load_weights_as_they_lie<Gemm>(of_term ? &args.low_rank.weight : &args.weight, full, shared.b(at.stage), column,
                                       tile.column, tile.expert);
      } else if constexpr (Gemm::kTransposed) {
        const CUtensorMap *rows = &args.a, *weight = &args.weight;
        int of_term = block;
        if constexpr (Gemm::kPair) {
          if (of_term >= args.term_blocks)
            of_term -= args.term_blocks, rows = &args.second_a, weight = &args.second_weight;
          if (of_term >= args.term_blocks)
            of_term -= args.term_blocks, rows = &args.third_a, weight = &args.third_weight;
        }
        const int column = of_term * Gemm::kBlockK;
        tma_load(rows, full, shared.a(at.stage), column, tile.row);
        load_weights_as_they_lie<Gemm>(weight, full, shared.b(at.stage), column, tile.column);
      } else {
        load_rows<Gemm>(args, args.a, full, shared.a(at.stage), block * Gemm::kBlockK, tile, rank);
        load_weights<Gemm>(args, full, shared.b(at.stage), block * Gemm::kBlockK, tile.weight_row());
      }
    }
    if constexpr (!Gemm::kOuter && !Gemm::kGrouped) {
      if (!is_masked<Gemm>(args)) produce_low_rank(max(k.x, args.own_blocks));
    }
    if constexpr (Gemm::kSplitK > 1) break;  // a cluster has one tile, and a loop would spill a register
  }
}

template <typename Gemm>
__device__ __forceinline__ uint64_t m_side_descriptor(uint32_t m_side, int step) {
  if constexpr (Gemm::kOuter) return transposed_wgmma_descriptor(m_side + step * kTransposedStepBytes);
  return wgmma_descriptor(m_side + step * kWgmmaStepBytes);
}

template <typename Gemm>
__device__ __forceinline__ uint64_t n_side_descriptor(uint32_t n_side, int step) {
  if constexpr (Gemm::kTransposed) return transposed_wgmma_descriptor(n_side + step * kTransposedStepBytes);
  return wgmma_descriptor(n_side + step * kWgmmaStepBytes);
}

// accumulator = the product over k_blocks blocks, for the rows of the wgmma's M and N side from first_m and first_n on;
// where it `adds`, accumulator += that. Calls on_last_block() once all the blocks have arrived.
template <typename Gemm, typename OnLastBlock>
__device__ __forceinline__ void multiply(const TiledGemmShared<Gemm>& shared, RingPosition& at,
                                         Accumulator<Gemm>& accumulator, int k_blocks, int first_m, int first_n,
                                         OnLastBlock&& on_last_block, bool adds = false) {
  using Mma = Wgmma<typename Gemm::Element, Gemm::kMmaN, Gemm::kTransposed, Gemm::kOuter>;
  constexpr int kRowBytes = Gemm::kBlockK * sizeof(typename Gemm::Element);
  const auto release = [&](int stage) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared.empty(stage));
  };
  const auto fence = [&] {
#pragma unroll
    for (int mma = 0; mma < Gemm::kMmas; ++mma) fence_accumulator(accumulator[mma]);
  };
#if __CUDACC_VER_MAJOR__ < 13
  constexpr bool kSetFirst = true;
#else
  constexpr bool kSetFirst = Gemm::kOuter;  // there may be no blocks of k
#endif
  // The first wgmma does not read its accumulators, but ptxas cannot know that. Unless they are set here, it may take
  // what the epilogue left in them for a write within the pipeline, and makes every wgmma wait (its warning C7515).
  if (kSetFirst && !adds) {
#pragma unroll
    for (int mma = 0; mma < Gemm::kMmas; ++mma) {
#pragma unroll
      for (int i = 0; i < Gemm::kAccumulators; ++i) accumulator[mma][i] = 0.0f;
    }
  }
  if (Gemm::kOuter && k_blocks == 0) return on_last_block();
  int previous = 0;
  for (int block = 0; block < k_blocks; ++block) {
    mbarrier_wait(shared.full(at.stage), at.parity);
    if (block == k_blocks - 1) on_last_block();
    const uint32_t m_side = (Gemm::kSwapped ? shared.b(at.stage) : shared.a(at.stage)) + first_m * kRowBytes;
    const uint32_t n_side = (Gemm::kSwapped ? shared.a(at.stage) : shared.b(at.stage)) + first_n * kRowBytes;
    fence();
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Gemm::kBlockK / kWgmmaK; ++step) {
#pragma unroll
      for (int mma = 0; mma < Gemm::kMmas; ++mma) {
        const uint32_t rows = m_side + mma * Gemm::kMmaStride * kRowBytes;
        Mma::multiply(accumulator[mma], m_side_descriptor<Gemm>(rows, step), n_side_descriptor<Gemm>(n_side, step),
                      adds || block > 0 || step > 0);
      }
    }
    wgmma_commit();
    fence();
    wgmma_wait<1>();
    if (block > 0) release(previous);
    previous = at.stage;
    at.advance();
  }
  wgmma_wait<0>();
  fence();
  release(previous);
}

// Adds the sums of a cluster that splits k. Every CTA finishes some of the rows of a: the others send it their sums of
// these through its ring, which is free by now, as a cluster computes a single tile. They are added in the order of the
// ranks, so that a row's results do not depend on where in a tile it lies.
template <typename Gemm>
__device__ __forceinline__ void reduce_across_cluster(const TiledGemmShared<Gemm>& shared, int rank,
                                                      float (&accumulator)[Gemm::kAccumulators]) {
  constexpr int kShare = Gemm::kAccumulators / Gemm::kSplitK;
  constexpr int kThreads = Gemm::kConsumers * 128;
  static_assert(kShare % 4 == 0, "sums are sent four at a time");
  const auto offset = [&](int from, int i) { return ((from * kShare + i) / 4 * kThreads + threadIdx.x) * 16; };
  cluster_sync();
#pragma unroll
  for (int distance = 1; distance < Gemm::kSplitK; ++distance) {
    const uint32_t ring = map_to_rank(shared.ring, (rank + distance) % Gemm::kSplitK);
#pragma unroll
    for (int i = 0; i < kShare; i += 4) {
      const int at = distance * kShare + i;
      store_cluster_float4(ring + offset(rank, i),
                           make_float4(accumulator[at], accumulator[at + 1], accumulator[at + 2], accumulator[at + 3]));
    }
  }
  cluster_sync();
#pragma unroll
  for (int i = 0; i < kShare; i += 4) {
    const float4 own = make_float4(accumulator[i], accumulator[i + 1], accumulator[i + 2], accumulator[i + 3]);
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int from = 0; from < Gemm::kSplitK; ++from) {
      const float4 received = load_shared_float4(shared.ring + offset(from, i));
      const float4 term = from == rank ? own : received;
      sum = make_float4(sum.x + term.x, sum.y + term.y, sum.z + term.z, sum.w + term.w);
    }
    accumulator[i] = sum.x;
    accumulator[i + 1] = sum.y;
    accumulator[i + 2] = sum.z;
    accumulator[i + 3] = sum.w;
  }
}

template <typename Gemm>
__device__ __forceinline__ void consume(const typename Gemm::Args& args, const TiledGemmShared<Gemm>& shared,
                                        int rank) {
  const int warp = warp_uniform(threadIdx.x / 32);
  const int consumer = warp / 4;
  const int group = consumer / Gemm::kConsumersOfTile;  // the warpgroups that share a tile have one number
  const int first_m = Gemm::kPingPong || Gemm::kHalvesRows ? 0 : consumer * 64;
  const int first_n = Gemm::kHalvesRows ? consumer * Gemm::kMmaN : 0;
  const auto tiles = tile_order(args);
  const int clusters = gridDim.x / Gemm::kSplitK;
  const auto k_blocks_of = [&](int index) {
    if constexpr (Gemm::kOuter) {
      return index < tiles.count() ? tiles.template tile<Gemm>(index).k_blocks : 0;
    } else {
      const int2 k = k_range<Gemm>(rank, args.k_blocks);
      return k.y - k.x;
    }
  };
  const bool biased = kTakesTileBias<Gemm> && (args.epilogue.bias != nullptr || args.epilogue.up_bias != nullptr);
  int buffer = 0;  // for the next store
  RingPosition at(Gemm::kStages);
  int index = blockIdx.x / Gemm::kSplitK;
  if (Gemm::kPingPong && consumer == 1) {
    at.skip(k_blocks_of(index));
    index += clusters;
  }
  // In ping-pong, a warpgroup waits until the other one's whole tile has arrived. An mbarrier tells rounds apart by
  // their parity alone, so nobody may wait for a round while the one before it is incomplete.
  constexpr int kTileBarrier = 1;
  constexpr int kTurnBarrier = kTileBarrier + Gemm::kConsumers;
  const bool idle = Gemm::kGrouped && static_cast<int>(blockIdx.x) >= tiles.count();
  if (Gemm::kPingPong && consumer == 1 && !idle) named_barrier_arrive(kTurnBarrier, Gemm::kConsumers * 128);
  [[maybe_unused]] RingPosition slot(Gemm::kSlots);  // the place of what a gradient is made of
  Accumulator<Gemm> accumulator;
  for (; index < tiles.count(); index += Gemm::kPingPong ? 2 * clusters : clusters) {
    const auto tile = tiles.template tile<Gemm>(index);
    const int k_blocks = k_blocks_of(index);
    const int column = tile.column;
    TileBias<Gemm> bias;
    if (biased) bias.load(args, tile, column);
    if constexpr (Gemm::kSwapped) {
      prefetch_biases<typename Gemm::Element>(args.epilogue, column, Gemm::kTileN, args.n);
    }
    if (Gemm::kPingPong) {
      named_barrier_sync(kTurnBarrier + consumer, Gemm::kConsumers * 128);
    } else if (biased) {
      named_barrier_sync(kTileBarrier + group, TileBias<Gemm>::kThreads);
    }
    if (biased) bias.store(shared.bias(group));  // the threads have passed a barrier since they read the last biases
    const auto on_last_block = [&] {
      if (Gemm::kPingPong && index + clusters < tiles.count())
        named_barrier_arrive(kTurnBarrier + 1 - consumer, Gemm::kConsumers * 128);
    };
    int masked_blocks = 0;
    if constexpr (kMayBeMasked<Gemm>) {
      if (is_masked<Gemm>(args)) {
        masked_blocks = k_blocks - args.own_blocks;
        multiply<Gemm>(shared, at, accumulator, masked_blocks, first_m, first_n, [] {});
        mask_sums<Gemm>(args.low_rank, accumulator, tile, first_m + warp % 4 * 16);
      }
    }
    multiply<Gemm>(shared, at, accumulator, k_blocks - masked_blocks, first_m, first_n, on_last_block,
                   is_masked<Gemm>(args));
    if (Gemm::kPingPong) at.skip(k_blocks_of(index + clusters));
    if constexpr (Gemm::kSplitK > 1) reduce_across_cluster<Gemm>(shared, rank, accumulator[0]);
    const int warp_m = first_m + warp % 4 * 16;
    if (biased) named_barrier_sync(kTileBarrier + group, TileBias<Gemm>::kThreads);
    if constexpr (Gemm::kPair) {
      int expert = 0;
      if constexpr (Gemm::kOuter) expert = tile.expert;
      store_tile<Gemm, Activation::kLinear>(args, accumulator, shared.bias(group), shared.store(warp), buffer,
                                            tile.row + warp_m, column, expert);
      continue;
    }
    visit_activation(args.epilogue.activation, [&]<Activation A>() {
      if constexpr (Gemm::kGradient) {
        store_gradients<Gemm, A>(args, shared, accumulator, slot, warp, buffer, tile, warp_m);
      } else if constexpr (Gemm::kSwapped) {
        store_swapped_tile<Gemm, A>(args, accumulator, shared.store(warp), buffer,
                                    row_of_share<Gemm>(args, tile, rank) + first_n, column + warp_m);
      } else {
        store_tile<Gemm, A>(args, accumulator, shared.bias(group), shared.store(warp), buffer, tile.row + warp_m,
                            column);
      }
    });
  }
  if (threadIdx.x % 32 == 0) tma_store_wait_read<0>();
  __syncwarp();
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <typename Gemm>
__global__ void __launch_bounds__(Gemm::kThreads, 1)
    tiled_gemm_kernel(const __grid_constant__ typename Gemm::Args args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ uint8_t raw_shared[];
  const TiledGemmShared<Gemm> shared(raw_shared);
  const int rank = Gemm::kSplitK == 1 ? 0 : cluster_rank();
  const int warp = warp_uniform(threadIdx.x / 32);

  if (threadIdx.x == 0) {
    prefetch_tensor_map(&args.a);
    prefetch_tensor_map(&args.weight);
    if (Gemm::kGated) prefetch_tensor_map(&args.up_weight);
    prefetch_tensor_map(&args.out);
    for (int stage = 0; stage < Gemm::kStages; ++stage) {
      mbarrier_init(shared.full(stage), 1);
      mbarrier_init(shared.empty(stage), Gemm::kConsumersOfTile * 4);  // one arrival per warp
    }
    for (int slot = 0; slot < Gemm::kConsumers * Gemm::kSlots; ++slot) {
      mbarrier_init(shared.slot_full(0, slot), 1);
      mbarrier_init(shared.slot_empty(0, slot), 4);  // likewise
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  allow_next_kernel();

  if (warp >= Gemm::kConsumers * 4) {
    shrink_registers<40>();
    if (threadIdx.x == Gemm::kConsumers * 128) produce<Gemm>(args, shared, rank);
    if constexpr (Gemm::kGradient) {  // a thread for each consumer
      const int consumer = warp - Gemm::kConsumers * 4 - 1;
      if (threadIdx.x % 32 == 0 && consumer >= 0 && consumer < Gemm::kConsumers) {
        load_kept<Gemm>(args, shared, consumer);
      }
    }
    __syncwarp();
    if constexpr (Gemm::kSplitK > 1) {  // all threads take part in the two barriers of reduce_across_cluster
      cluster_sync();
      cluster_sync();
    }
  } else {
    grow_registers<232>();
    consume<Gemm>(args, shared, rank);
  }
#endif
}

}  // namespace fused_mlp::sm90
