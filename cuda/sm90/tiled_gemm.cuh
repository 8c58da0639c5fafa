// The GEMM for many rows: persistent CTAs of one producer warp, which keeps a ring of shared memory stages filled by
// TMA, and two consumer warpgroups, which multiply by wgmma. They take a tile each in turn (ping-pong: one finishes its
// tile while the other has the tensor cores), or share every tile (cooperative).
//
// Tiles of 128 rows of A have these on the wgmma's M side. For other numbers of rows the operands swap places: the M
// side, a multiple of 64, is weight rows, and the N side is as many rows of A as fill the chip best.
//
// A gated problem is the plain one with a B tile filled from two tensors, gate rows in the first half, up rows in the
// second: accumulators i and i + kBlockN / 4 of a thread are then gate and up of one output element, or, swapped,
// accumulators i of its first and of its second wgmma.
#pragma once

#include "ptx.cuh"
#include "ring.cuh"
#include "swapped_store.cuh"
#include "tiled_layout.cuh"
#include "tiled_store.cuh"
#include "wgmma.cuh"

namespace fused_mlp::sm90 {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// A CTA that splits k with others gets the columns that it will finish first, then those of the next ranks in turn.
template <typename Gemm>
__device__ __forceinline__ void load_weights(const TiledGemmArgs& args, uint32_t full, uint32_t b, int column,
                                             int first_row, int rank) {
  constexpr int kBoxesOfPart = Gemm::kBoxesB / Gemm::kParts;
#pragma unroll
  for (int box = 0; box < Gemm::kBoxesB; ++box) {
    const CUtensorMap* map = box < kBoxesOfPart ? &args.weight : &args.up_weight;
    const int row = first_row + (box + rank) % kBoxesOfPart * Gemm::kBoxRowsB;
    tma_load(map, full, b + box * (Gemm::kBytesB / Gemm::kBoxesB), column, row);
  }
}

template <typename Gemm>
__device__ __forceinline__ void produce(const TiledGemmArgs& args, const TiledGemmShared<Gemm>& shared, int rank) {
  const TileOrder tiles{args};
  const int2 k = k_range<Gemm>(rank, args.k_blocks);
  RingPosition at(Gemm::kStages);
  for (int index = blockIdx.x / Gemm::kSplitK; index < tiles.count(); index += gridDim.x / Gemm::kSplitK) {
    const Tile tile = tiles.tile<Gemm>(index);
    for (int block = k.x; block < k.y; ++block, at.advance()) {
      const uint32_t full = shared.full(at.stage);
      mbarrier_wait(shared.empty(at.stage), at.parity ^ 1);
      mbarrier_arrive_expect(full, args.stage_bytes);
      tma_load(&args.a, full, shared.a(at.stage), block * Gemm::kBlockK, tile.row);
      load_weights<Gemm>(args, full, shared.b(at.stage), block * Gemm::kBlockK, tile.column, rank);
    }
  }
}

// accumulator = the product over k_blocks blocks, from rows first_m and first_n of the wgmma's M and N side on.
// Calls on_last_block() once all the blocks have arrived.
template <typename Gemm, typename OnLastBlock>
__device__ __forceinline__ void multiply(const TiledGemmShared<Gemm>& shared, RingPosition& at,
                                         Accumulator<Gemm>& accumulator, int k_blocks, int first_m, int first_n,
                                         OnLastBlock&& on_last_block) {
  using Mma = Wgmma<typename Gemm::Element, Gemm::kMmaN>;
  constexpr int kRowBytes = Gemm::kBlockK * sizeof(typename Gemm::Element);
  const auto release = [&](int stage) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared.empty(stage));
  };
  const auto fence = [&] {
#pragma unroll
    for (int mma = 0; mma < Gemm::kMmas; ++mma) fence_accumulator(accumulator[mma]);
  };
#if __CUDACC_VER_MAJOR__ < 13
  // The first wgmma does not read its accumulators, but that is known at run time only: unless they are defined here,
  // ptxas takes what the epilogue left in them for a definition inside the pipeline, and has every wgmma wait (C7515).
#pragma unroll
  for (int mma = 0; mma < Gemm::kMmas; ++mma) {
#pragma unroll
    for (int i = 0; i < Gemm::kAccumulators; ++i) accumulator[mma][i] = 0.0f;
  }
#endif
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
        Mma::multiply(accumulator[mma], wgmma_descriptor(rows + step * kWgmmaStepBytes),
                      wgmma_descriptor(n_side + step * kWgmmaStepBytes), block > 0 || step > 0);
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

// Where a cluster splits k: every CTA gets the sums of the columns it finishes, added in a fixed order, through its
// ring (free by now: a cluster computes one tile).
template <typename Gemm>
__device__ __forceinline__ void reduce_across_cluster(const TiledGemmShared<Gemm>& shared, int rank,
                                                      float (&accumulator)[Gemm::kAccumulators]) {
  constexpr int kPart = Gemm::kAccumulators / Gemm::kParts;
  constexpr int kShare = kPart / Gemm::kSplitK;
  constexpr int kThreads = Gemm::kConsumers * 128;
  static_assert(kShare % 4 == 0);
  const auto offset = [&](int distance, int part, int i) {
    return ((((distance - 1) * Gemm::kParts + part) * kShare + i) / 4 * kThreads + threadIdx.x) * 16;
  };
  cluster_sync();
#pragma unroll
  for (int distance = 1; distance < Gemm::kSplitK; ++distance) {
    const uint32_t base = map_to_rank(shared.ring, (rank + distance) % Gemm::kSplitK);
#pragma unroll
    for (int part = 0; part < Gemm::kParts; ++part) {
#pragma unroll
      for (int i = 0; i < kShare; i += 4) {
        const int at = part * kPart + distance * kShare + i;
        store_cluster_float4(base + offset(distance, part, i), make_float4(accumulator[at], accumulator[at + 1],
                                                                           accumulator[at + 2], accumulator[at + 3]));
      }
    }
  }
  cluster_sync();
#pragma unroll
  for (int distance = 1; distance < Gemm::kSplitK; ++distance) {
#pragma unroll
    for (int part = 0; part < Gemm::kParts; ++part) {
#pragma unroll
      for (int i = 0; i < kShare; i += 4) {
        const float4 term = load_shared_float4(shared.ring + offset(distance, part, i));
        const int at = part * kPart + i;
        accumulator[at] += term.x;
        accumulator[at + 1] += term.y;
        accumulator[at + 2] += term.z;
        accumulator[at + 3] += term.w;
      }
    }
  }
}

template <typename Gemm>
__device__ __forceinline__ void consume(const TiledGemmArgs& args, const TiledGemmShared<Gemm>& shared, int rank) {
  const int warp = warp_uniform(threadIdx.x / 32);
  const int consumer = warp / 4;
  const int group = consumer / Gemm::kConsumersOfTile;  // of the threads that share a tile
  const int first_m = Gemm::kPingPong || Gemm::kHalvesRows ? 0 : consumer * 64;
  const int first_n = Gemm::kHalvesRows ? consumer * Gemm::kMmaN : 0;
  const TileOrder tiles{args};
  const int2 k = k_range<Gemm>(rank, args.k_blocks);
  const int k_blocks = k.y - k.x;
  const int clusters = gridDim.x / Gemm::kSplitK;
  const bool biased = !Gemm::kSwapped && (args.epilogue.bias != nullptr || args.epilogue.up_bias != nullptr);
  int buffer = 0;  // the next store's
  RingPosition at(Gemm::kStages);
  int index = blockIdx.x / Gemm::kSplitK;
  if (Gemm::kPingPong && consumer == 1) {
    at.skip(k_blocks);
    index += clusters;
  }
  // In ping-pong a warpgroup waits until the other has seen its whole tile arrive: an mbarrier tells rounds apart only
  // by their parity, so nobody may wait for a round before the one before it is complete.
  constexpr int kTileBarrier = 1;
  constexpr int kTurnBarrier = kTileBarrier + Gemm::kConsumers;
  if (Gemm::kPingPong && consumer == 1) named_barrier_arrive(kTurnBarrier, Gemm::kConsumers * 128);
  Accumulator<Gemm> accumulator;
  for (; index < tiles.count(); index += Gemm::kPingPong ? 2 * clusters : clusters) {
    const Tile tile = tiles.tile<Gemm>(index);
    const int column = tile.column + rank * Gemm::kShareN;
    TileBias<Gemm> bias;
    if (biased) bias.load(args, column);
    if (Gemm::kPingPong) {
      named_barrier_sync(kTurnBarrier + consumer, Gemm::kConsumers * 128);
    } else if (biased) {
      named_barrier_sync(kTileBarrier + group, TileBias<Gemm>::kThreads);
    }
    if (biased) bias.store(shared.bias(group));  // all its threads have passed a barrier since they read the last ones
    multiply<Gemm>(shared, at, accumulator, k_blocks, first_m, first_n, [&] {
      if (Gemm::kPingPong && index + clusters < tiles.count())
        named_barrier_arrive(kTurnBarrier + 1 - consumer, Gemm::kConsumers * 128);
    });
    if (Gemm::kPingPong) at.skip(k_blocks);
    if constexpr (Gemm::kSplitK > 1) reduce_across_cluster<Gemm>(shared, rank, accumulator[0]);
    const int warp_m = first_m + warp % 4 * 16;
    if (biased) named_barrier_sync(kTileBarrier + group, TileBias<Gemm>::kThreads);
    visit_activation(args.epilogue.activation, [&]<Activation A>() {
      if constexpr (Gemm::kSwapped) {
        store_swapped_tile<Gemm, A>(args, accumulator, shared.store(warp), buffer, tile.row + first_n,
                                    tile.column + warp_m);
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
__global__ void __launch_bounds__(Gemm::kThreads, 1) tiled_gemm_kernel(const __grid_constant__ TiledGemmArgs args) {
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
      mbarrier_init(shared.empty(stage), Gemm::kConsumersOfTile * 4);  // each warp
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  allow_next_kernel();

  if (warp >= Gemm::kConsumers * 4) {
    shrink_registers<40>();
    if (threadIdx.x == Gemm::kConsumers * 128) produce<Gemm>(args, shared, rank);
    __syncwarp();
    if constexpr (Gemm::kSplitK > 1) {  // the consumers' two in reduce_across_cluster
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
