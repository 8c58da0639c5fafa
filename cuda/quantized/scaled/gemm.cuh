// The GEMM of e4m3 with scales, for many rows on Hopper: wgmma multiplies e4m3 by e4m3.
//
// The tensor cores accumulate with fewer bits than float32 has. So after each block of 128 of k a warpgroup multiplies
// the block's sums by its scales and adds them to its own sums, while the other warpgroup uses the tensor cores. A tile
// is 128 rows of a, 64 per warpgroup, by two halves of 128 weight rows: gate and up of the same columns, or adjacent
// columns. One warp fills the ring by TMA. CTAs are persistent. Two CTAs with the same weights may form a cluster, and
// each loads one half for both. With few tiles, several CTAs share k, and another kernel adds their sums (parts.cuh).
// For experts, rows of tokens are gathered (gather.cuh), and a CTA takes the next tile when it is done with one.
#pragma once

#include "gather.cuh"
#include "store.cuh"

namespace fused_mlp {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// The tiles of a CTA, one after the other. Each part of k of a tile counts as a tile.
template <typename Gemm>
struct ScaledTiles {
  static constexpr int kGroupUnits = 8;
  const ScaledArgs& args;
  const int rank;  // in the cluster
  const int experts_units;
  int index;
  const int step;

  __device__ __forceinline__ explicit ScaledTiles(const ScaledArgs& args)
      : args(args),
        rank(args.pair > 1 ? sm90::cluster_rank() : 0),
        experts_units(Gemm::kExperts ? load_fresh(args.experts.count) : 0),
        index(blockIdx.x / args.pair),
        step(gridDim.x / args.pair) {}

  __device__ __forceinline__ int units_m() const { return Gemm::kExperts ? experts_units : args.units_m; }
  __device__ __forceinline__ bool done() const { return index >= units_m() * args.tiles_n * args.split; }

  // The next tile. Tiles of experts take different times, so a CTA that is done takes the first one that is left.
  __device__ __forceinline__ int take_next() const {
    return Gemm::kExperts ? step + atomicAdd(args.experts.taken, 1) : index + step;
  }

  __device__ __forceinline__ ScaledTile tile() const {
    const int2 at = grouped_tile<kGroupUnits>(index / args.split, units_m(), args.tiles_n);
    const int unit = at.x * args.pair + rank, row = unit * Gemm::kTileM, rows = args.m - row;
    const BlockCode code = Gemm::kExperts ? BlockCode{load_fresh(args.experts.codes + unit)}
                                          : BlockCode::of(0, max(0, min(rows, Gemm::kTileM)));
    return {row, at.y * Gemm::kColumns, index % args.split, code};
  }
};

template <typename Gemm>
__device__ __forceinline__ void load_weights(const ScaledArgs& args, const ScaledShared<Gemm>& shared, int stage,
                                             int block, const ScaledTile& tile, int first_row, int rank) {
  constexpr int kWords = Gemm::kBlockK / 2;  // in 16-bit words
#pragma unroll
  for (int half = 0; half < Gemm::kHalves; ++half) {
    const CUtensorMap* const map = Gemm::kGated && half == 1 ? &args.up_weight : &args.weight;
    const int column = Gemm::kGated ? tile.column : tile.column + half * Gemm::kHalfN;
    const int row = first_row + column;
    if (args.pair > 1) {
      if (half == rank) {
        sm90::tma_load_to(3, map, shared.full(stage), shared.half(stage, half), block * kWords, row);
      }
    } else {
      sm90::tma_load(map, shared.full(stage), shared.half(stage, half), block * kWords, row);
    }
  }
}

template <typename Gemm>
__device__ __forceinline__ void load_rows(const ScaledArgs& args, const ScaledShared<Gemm>& shared, int stage,
                                          int block, const ScaledTile& tile) {
  sm90::tma_load(&args.a, shared.full(stage), shared.a(stage), block * (Gemm::kBlockK / 2), tile.row);
  sm90::bulk_load(args.a_rows.scales + block * args.a_rows.scale_stride + tile.row, shared.full(stage),
                  shared.scales(stage), Gemm::kScaleBytes);
}

// Run by one thread. The first stages are filled with weights before the kernel that writes a is done.
template <typename Gemm>
__device__ __forceinline__ void produce(const ScaledArgs& args, const ScaledShared<Gemm>& shared) {
  const uint32_t bytes = args.loaded_rows * Gemm::kBlockK + Gemm::kHalves * Gemm::kHalfBytes + Gemm::kScaleBytes;
  ScaledTiles<Gemm> tiles(args);
  sm90::RingPosition at(Gemm::kStages, 1);  // all stages are empty
  int early = 0;
  if (!tiles.done()) {
    const ScaledTile tile = tiles.tile();
    const int2 blocks = tile.blocks(args);
    early = min(Gemm::kStages, blocks.y - blocks.x);
    for (int stage = 0; stage < early; ++stage) {
      sm90::mbarrier_arrive_expect(shared.full(stage), bytes);
      load_weights<Gemm>(args, shared, stage, blocks.x + stage, tile, 0, tiles.rank);
    }
  }
  wait_for_previous_kernel();
  for (; !tiles.done(); tiles.index = tiles.take_next()) {
    const ScaledTile tile = tiles.tile();
    const int2 blocks = tile.blocks(args);
#pragma unroll 1
    for (int block = blocks.x; block < blocks.y; ++block, at.advance()) {
      if (early > 0) {
        --early;
      } else {
        sm90::mbarrier_wait(shared.empty(at.stage), at.parity);
        sm90::mbarrier_arrive_expect(shared.full(at.stage), bytes);
        load_weights<Gemm>(args, shared, at.stage, block, tile, 0, tiles.rank);
      }
      load_rows<Gemm>(args, shared, at.stage, block, tile);
    }
  }
}

// The same for experts, by one thread, or by the whole warpgroup if rows are gathered. After the last tile, a stage
// marks the end.
template <typename Gemm>
__device__ __forceinline__ void produce_experts(const ScaledArgs& args, const ScaledShared<Gemm>& shared) {
  constexpr uint32_t kWeightBytes = Gemm::kHalves * Gemm::kHalfBytes;
  const bool gathers = args.gathers<Gemm>(), first = threadIdx.x == Gemm::kConsumers;
  const uint32_t bytes = kWeightBytes + (gathers ? 0 : args.loaded_rows * Gemm::kBlockK + Gemm::kScaleBytes);
  ScaledTiles<Gemm> tiles(args);
  ScaledGather<Gemm> gather{args};
  const auto start_stage = [&](int stage, int block, const ScaledTile& tile) {
    if (!first) return;
    shared.put(stage, tile);
    sm90::mbarrier_arrive_expect(shared.full(stage), bytes);
    const int first_row = tile.code.expert() * static_cast<int>(args.experts.weight_rows);
    load_weights<Gemm>(args, shared, stage, block, tile, first_row, tiles.rank);
  };
  sm90::RingPosition at(Gemm::kStages, 1);  // all stages are empty
  int early = 0;
  if (!tiles.done()) {
    const ScaledTile tile = tiles.tile();
    const int2 blocks = tile.blocks(args);
    early = min(Gemm::kStages, blocks.y - blocks.x);
    for (int stage = 0; stage < early; ++stage) start_stage(stage, blocks.x + stage, tile);
  }
  wait_for_previous_kernel();
  while (true) {
    if (early == 0) sm90::mbarrier_wait(shared.empty(at.stage), at.parity);
    ScaledTile tile{-1};
    if (first) {
      if (!tiles.done()) tile = tiles.tile();
      shared.put(at.stage, tile);
    }
    if (gathers) {
      sm90::named_barrier_sync(2, ScaledGather<Gemm>::kThreads);
      tile = shared.tile(at.stage);
    }
    if (tile.row < 0) break;
    const int next = first ? tiles.take_next() : 0;
    const int2 blocks = tile.blocks(args);
    if (gathers) gather.find(tile);
#pragma unroll 1
    for (int block = blocks.x; block < blocks.y; ++block, at.advance()) {
      if (early > 0) {
        --early;
      } else {
        if (block > blocks.x) sm90::mbarrier_wait(shared.empty(at.stage), at.parity);
        start_stage(at.stage, block, tile);
      }
      if (gathers) {
        gather.copy(shared, at.stage, block, tile.code.rows());
      } else {
        load_rows<Gemm>(args, shared, at.stage, block, tile);
      }
    }
    tiles.index = next;
  }
  if (first) sm90::mbarrier_arrive(shared.full(at.stage));
  if (gathers) sm90::mbarrier_arrive(shared.full(at.stage));
}

// The scales of blocks of k for the rows of one half; 1 if rows have scales of their own.
struct ScalesOfHalf {
  const float* scales;
  const int shift;

  __device__ __forceinline__ ScalesOfHalf(const ScaledArgs& args, const CodedWeight& weight, int expert, int column)
      : scales(args.by_rows ? nullptr
                            : weight.scales + expert * args.experts.scales_of_expert +
                                  min(column, args.n - 1) / weight.scale_rows * weight.scale_stride),
        shift(weight.scale_shift) {}
  __device__ __forceinline__ float operator()(int block) const {
    return scales == nullptr ? 1.0f : __ldg(scales + (block * (kScaledGroup / kCodedBlock) >> shift));
  }
};

// sums = the products of the blocks of k, as they arrive.
template <typename Gemm>
__device__ __forceinline__ void multiply(const ScaledArgs& args, const ScaledShared<Gemm>& shared,
                                         const ScaledTile& tile, sm90::RingPosition& at, ScaledSums<Gemm>& sums) {
  using Mma = sm90::Wgmma<__nv_fp8_e4m3, Gemm::kHalfN>;
  const int group = sm90::warp_uniform(threadIdx.x / 128), lane = threadIdx.x % 32;
  const int local = threadIdx.x / 32 * 16 + lane / 4, expert = tile.code.expert();
  const int2 blocks = tile.blocks(args);
  // Each lane has read its own scales, so each lane arrives.
  const auto release = [&] {
    if (args.pair > 1) {
      sm90::mbarrier_arrive_at(shared.empty(at.stage), 0);
      sm90::mbarrier_arrive_at(shared.empty(at.stage), 1);
    } else {
      sm90::mbarrier_arrive(shared.empty(at.stage));
    }
  };
  if (Gemm::kExperts && group * 64 >= tile.code.rows()) {  // the warpgroup has no rows
    for (int block = blocks.x; block < blocks.y; ++block, at.advance()) {
      sm90::mbarrier_wait(shared.full(at.stage), at.parity);
      release();
    }
    return;
  }
  const ScalesOfHalf first(args, args.of_weight, expert, tile.column);
  const ScalesOfHalf second(args, Gemm::kGated ? args.of_up_weight : args.of_weight, expert,
                            Gemm::kGated ? tile.column : tile.column + Gemm::kHalfN);
#pragma unroll
  for (int half = 0; half < Gemm::kHalves; ++half) {
#pragma unroll
    for (int i = 0; i < Gemm::kSums; ++i) sums[half][i] = 0.0f;
  }
  float scale[2] = {first(blocks.x), second(blocks.x)};
#pragma unroll 1
  for (int block = blocks.x; block < blocks.y; ++block, at.advance()) {
    const int next = min(block + 1, blocks.y - 1);
    const float scale_behind[2] = {first(next), second(next)};
    sm90::mbarrier_wait(shared.full(at.stage), at.parity);
    if (args.gathers<Gemm>()) sm90::fence_shared_to_async();  // other threads' copies, before wgmma reads them
    float of_rows[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      asm volatile("ld.shared.f32 %0, [%1];"
                   : "=f"(of_rows[i])
                   : "r"(shared.scales(at.stage) + (local + i * 8) * 4)
                   : "memory");
    }
    const uint64_t rows = sm90::wgmma_descriptor(shared.a(at.stage) + group * 64 * Gemm::kBlockK);
    float of_block[Gemm::kSums];
#pragma unroll
    for (int half = 0; half < Gemm::kHalves; ++half) {
      const uint64_t weights = sm90::wgmma_descriptor(shared.half(at.stage, half));
      sm90::fence_accumulator(of_block);
      sm90::wgmma_fence();
#pragma unroll
      for (int step = 0; step < Gemm::kBlockK / 32; ++step) {
        constexpr int kStep = sm90::kWgmmaStepBytes >> 4;
        Mma::multiply(of_block, rows + step * kStep, weights + step * kStep, step > 0);
      }
      sm90::wgmma_commit();
      sm90::fence_accumulator(of_block);
      sm90::wgmma_wait<0>();
      sm90::fence_accumulator(of_block);
      if (half == Gemm::kHalves - 1) release();
      const float by[2] = {of_rows[0] * scale[half], of_rows[1] * scale[half]};
#pragma unroll
      for (int i = 0; i < Gemm::kSums; ++i) sums[half][i] = fmaf(of_block[i], by[i / 2 % 2], sums[half][i]);
    }
    scale[0] = scale_behind[0];
    scale[1] = scale_behind[1];
  }
}

template <typename Gemm>
__device__ __forceinline__ void consume(const ScaledArgs& args, const ScaledShared<Gemm>& shared) {
  const int warp = sm90::warp_uniform(threadIdx.x / 32);
  sm90::RingPosition at(Gemm::kStages);
  ScaledBoxes<Gemm> boxes{shared.boxes(warp)};
  const auto finish = [&](ScaledTile tile) {
    ScaledSums<Gemm> sums;
    multiply<Gemm>(args, shared, tile, at, sums);
    if (warp * Gemm::kBoxRows >= tile.code.rows()) return;
    tile.row += warp * Gemm::kBoxRows;
    store_tile<Gemm>(args, sums, boxes, tile);
  };
  if constexpr (Gemm::kExperts) {
    while (true) {
      sm90::mbarrier_wait(shared.full(at.stage), at.parity);
      const ScaledTile tile = shared.tile(at.stage);
      if (tile.row < 0) break;
      finish(tile);
    }
  } else {
    for (ScaledTiles<Gemm> tiles(args); !tiles.done(); tiles.index = tiles.take_next()) finish(tiles.tile());
  }
  if (threadIdx.x % 32 == 0) sm90::tma_store_wait_read<0>();
  __syncwarp();
}

#endif

template <typename Gemm>
__global__ void __launch_bounds__(Gemm::kThreads, 1) scaled_kernel(const __grid_constant__ ScaledArgs args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(Gemm::kGivenAlignment) uint8_t raw_shared[];
  const ScaledShared<Gemm> shared(raw_shared);
  // A product of experts reads lists before it waits: they were written before the previous kernel let it start.
  if (args.gathers<Gemm>()) wait_for_previous_kernel();
  allow_next_kernel();
  if (threadIdx.x == 0) {
    if (!args.gathers<Gemm>()) sm90::prefetch_tensor_map(&args.a);
    sm90::prefetch_tensor_map(&args.weight);
    if (Gemm::kGated) sm90::prefetch_tensor_map(&args.up_weight);
    sm90::prefetch_tensor_map(&args.out);
    for (int stage = 0; stage < Gemm::kStages; ++stage) {
      sm90::mbarrier_init(shared.full(stage), 1 + (args.gathers<Gemm>() ? ScaledGather<Gemm>::kThreads : 0));
      sm90::mbarrier_init(shared.empty(stage), args.pair * Gemm::kConsumers);
    }
    sm90::fence_mbarrier_init();
  }
  __syncthreads();
  if (args.pair > 1) sm90::cluster_sync();  // no CTA writes to one whose barriers are not initialised
  if (threadIdx.x >= Gemm::kConsumers) {
    sm90::shrink_registers<Gemm::kProducerRegisters>();
    if (args.gathers<Gemm>() || threadIdx.x == Gemm::kConsumers) {
      if constexpr (Gemm::kExperts) {
        produce_experts<Gemm>(args, shared);
      } else {
        produce<Gemm>(args, shared);
      }
    }
    __syncwarp();
  } else {
    sm90::grow_registers<Gemm::kConsumerRegisters>();
    consume<Gemm>(args, shared);
  }
  if (args.pair > 1) sm90::cluster_sync();  // no CTA exits while others still access its memory
#endif
}

}  // namespace fused_mlp
