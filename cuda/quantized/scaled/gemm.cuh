// The GEMM of e4m3 with scales, for many rows on Hopper: wgmma multiplies e4m3 by e4m3.
//
// The tensor cores add up in fewer bits than float32 has. So after each block of 128 of k a warpgroup multiplies the
// block's sums by its scales, and adds them to sums of its own, while the other warpgroup has the tensor cores. A tile
// is 128 rows of a, 64 for each of two warpgroups, by two halves of 128 weight rows: gate and up of the same columns,
// or adjacent columns. One warp fills the ring by TMA. CTAs are persistent; two of them with the same weights may be a
// cluster, and each brings one half to both. Where there are few tiles, the CTAs of a cluster share k instead, and their
// sums are added in the order of their ranks.
#pragma once

#include "store.cuh"

namespace fused_mlp {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// The tiles of a CTA, one after the other.
struct ScaledTiles {
  static constexpr int kGroupUnits = 8;
  const ScaledArgs& args;
  const int rank;  // in the cluster
  int index;
  const int step;

  __device__ __forceinline__ explicit ScaledTiles(const ScaledArgs& args)
      : args(args),
        rank(args.pair * args.split > 1 ? sm90::cluster_rank() : 0),
        index(blockIdx.x / (args.pair * args.split)),
        step(gridDim.x / (args.pair * args.split)) {}

  __device__ __forceinline__ bool done() const { return index >= args.units_m * args.tiles_n; }
  __device__ __forceinline__ void advance() { index += step; }
  __device__ __forceinline__ int k_begin() const { return args.split > 1 ? rank * args.k_blocks / args.split : 0; }
  __device__ __forceinline__ int k_end() const {
    return args.split > 1 ? (rank + 1) * args.k_blocks / args.split : args.k_blocks;
  }

  template <typename Gemm>
  __device__ __forceinline__ ScaledTile tile() const {
    const int2 at = grouped_tile<kGroupUnits>(index, args.units_m, args.tiles_n);
    const int columns = Gemm::kGated ? Gemm::kHalfN : args.halves * Gemm::kHalfN;
    return {(at.x * args.pair + (args.pair > 1 ? rank : 0)) * Gemm::kTileM, at.y * columns};
  }
};

template <typename Gemm>
__device__ __forceinline__ void load_weights(const ScaledArgs& args, const ScaledShared<Gemm>& shared, int stage,
                                             int block, const ScaledTile& tile, int rank) {
  constexpr int kWords = Gemm::kBlockK / 2;  // of 16 bits
#pragma unroll
  for (int half = 0; half < Gemm::kHalves; ++half) {
    const CUtensorMap* const map = Gemm::kGated && half == 1 ? &args.up_weight : &args.weight;
    const int row = Gemm::kGated ? tile.column : tile.column + half * Gemm::kHalfN;
    if (args.pair > 1) {
      if (half == rank) {
        sm90::tma_load_to(3, map, shared.full(stage), shared.half(stage, half), block * kWords, row);
      }
    } else if (half < args.halves) {
      sm90::tma_load(map, shared.full(stage), shared.half(stage, half), block * kWords, row);
    }
  }
}

template <typename Gemm>
__device__ __forceinline__ void load_rows(const ScaledArgs& args, const ScaledShared<Gemm>& shared, int stage,
                                          int block, const ScaledTile& tile) {
  sm90::tma_load(&args.a, shared.full(stage), shared.a(stage), block * (Gemm::kBlockK / 2), tile.row);
  sm90::bulk_load(args.a_scales + block * args.a_scale_stride + tile.row, shared.full(stage), shared.scales(stage),
                  Gemm::kScaleBytes);
}

// Run by one thread. The first stages are filled with weights before the kernel that writes a is done.
template <typename Gemm>
__device__ __forceinline__ void produce(const ScaledArgs& args, const ScaledShared<Gemm>& shared) {
  const uint32_t bytes = args.loaded_rows * Gemm::kBlockK + args.halves * Gemm::kHalfBytes + Gemm::kScaleBytes;
  ScaledTiles tiles(args);
  sm90::RingPosition at(Gemm::kStages, 1);  // all stages are empty
  int early = 0;
  if (!tiles.done()) {
    const ScaledTile tile = tiles.tile<Gemm>();
    early = min(Gemm::kStages, tiles.k_end() - tiles.k_begin());
    for (int stage = 0; stage < early; ++stage) {
      sm90::mbarrier_arrive_expect(shared.full(stage), bytes);
      load_weights<Gemm>(args, shared, stage, tiles.k_begin() + stage, tile, tiles.rank);
    }
  }
  wait_for_previous_kernel();
  for (; !tiles.done(); tiles.advance()) {
    const ScaledTile tile = tiles.tile<Gemm>();
#pragma unroll 1
    for (int block = tiles.k_begin(); block < tiles.k_end(); ++block, at.advance()) {
      if (early > 0) {
        --early;
      } else {
        sm90::mbarrier_wait(shared.empty(at.stage), at.parity);
        sm90::mbarrier_arrive_expect(shared.full(at.stage), bytes);
        load_weights<Gemm>(args, shared, at.stage, block, tile, tiles.rank);
      }
      load_rows<Gemm>(args, shared, at.stage, block, tile);
    }
  }
}

// The scales of blocks of k of the rows of one half; 1 where rows have scales of their own.
struct ScalesOfHalf {
  const float* scales;
  const int shift;

  __device__ __forceinline__ ScalesOfHalf(const ScaledArgs& args, const CodedWeight& weight, int column)
      : scales(args.by_rows
                   ? nullptr
                   : weight.scales + min(column, args.n - 1) / weight.scale_rows * weight.scale_stride),
        shift(weight.scale_shift) {}
  __device__ __forceinline__ float operator()(int block) const {
    return scales == nullptr ? 1.0f : __ldg(scales + (block * (kScaledGroup / kCodedBlock) >> shift));
  }
};

// sums = the products of the blocks of k, as they arrive.
template <typename Gemm, int kVariant>
__device__ __forceinline__ void multiply(const ScaledArgs& args, const ScaledShared<Gemm>& shared,
                                         const ScaledTiles& tiles, const ScaledTile& tile, sm90::RingPosition& at,
                                         ScaledSums<Gemm>& sums) {
  using Mma = sm90::Wgmma<__nv_fp8_e4m3, Gemm::kHalfN>;
  const int group = sm90::warp_uniform(threadIdx.x / 128), lane = threadIdx.x % 32;
  const int local = threadIdx.x / 32 * 16 + lane / 4;
  const ScalesOfHalf first(args, args.of_weight, tile.column);
  const ScalesOfHalf second(args, Gemm::kGated ? args.of_up_weight : args.of_weight,
                            Gemm::kGated ? tile.column : tile.column + Gemm::kHalfN);
#pragma unroll
  for (int half = 0; half < Gemm::kHalves; ++half) {
#pragma unroll
    for (int i = 0; i < Gemm::kSums; ++i) sums[half][i] = 0.0f;
  }
  const int end = tiles.k_end();
  float scale[2] = {first(tiles.k_begin()), second(tiles.k_begin())};
#pragma unroll 1
  for (int block = tiles.k_begin(); block < end; ++block, at.advance()) {
    const int next = min(block + 1, end - 1);
    const float scale_behind[2] = {first(next), second(next)};
    sm90::mbarrier_wait(shared.full(at.stage), at.parity);
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
      if (half > 0 && args.halves == 1) break;
      const uint64_t weights = sm90::wgmma_descriptor(shared.half(at.stage, half));
      if constexpr (kVariant == 1) sm90::named_barrier_sync(2 + group, Gemm::kConsumers);
      sm90::fence_accumulator(of_block);
      sm90::wgmma_fence();
#pragma unroll
      for (int step = 0; step < Gemm::kBlockK / 32; ++step) {
        constexpr int kStep = sm90::kWgmmaStepBytes >> 4;
        Mma::multiply(of_block, rows + step * kStep, weights + step * kStep, step > 0);
      }
      sm90::wgmma_commit();
      if constexpr (kVariant == 1) sm90::named_barrier_arrive(3 - group, Gemm::kConsumers);
      sm90::fence_accumulator(of_block);
      sm90::wgmma_wait<0>();
      sm90::fence_accumulator(of_block);
      if (half == args.halves - 1 && lane < args.pair) {
        if (args.pair > 1) {
          sm90::mbarrier_arrive_at(shared.empty(at.stage), lane);
        } else {
          sm90::mbarrier_arrive(shared.empty(at.stage));
        }
      }
      const float by[2] = {of_rows[0] * scale[half], of_rows[1] * scale[half]};
#pragma unroll
      for (int i = 0; i < Gemm::kSums; ++i) sums[half][i] = fmaf(of_block[i], by[i / 2 % 2], sums[half][i]);
    }
    if (kVariant == 2 && group == 0 && block == tiles.k_begin() + 1 && tiles.index < tiles.step) {
      sm90::named_barrier_arrive(2, Gemm::kConsumers);
    }
    scale[0] = scale_behind[0];
    scale[1] = scale_behind[1];
  }
}

// Adds the cluster's sums, in the order of the ranks. Each CTA finishes the rows of some of its warps; returns true in
// these.
template <typename Gemm>
__device__ __forceinline__ bool add_sums_of_cluster(const ScaledArgs& args, const ScaledShared<Gemm>& shared, int rank,
                                                    int warp, ScaledSums<Gemm>& sums) {
  constexpr int kFours = Gemm::kSums / 4;
  sm90::named_barrier_sync(1, Gemm::kConsumers);  // the sums go where the ring was: all warps must be done with it
#pragma unroll
  for (int i = 0; i < Gemm::kHalves * kFours; ++i) {
    const float* const of = sums[i / kFours] + i % kFours * 4;
    sm90::store_cluster_float4(shared.sums(warp, i), make_float4(of[0], of[1], of[2], of[3]));
  }
  sm90::cluster_sync();
  if (warp * args.split / (Gemm::kConsumers / 32) != rank) return false;
#pragma unroll
  for (int half = 0; half < Gemm::kHalves; ++half) {
#pragma unroll
    for (int i = 0; i < Gemm::kSums; ++i) sums[half][i] = 0.0f;
  }
#pragma unroll 1
  for (int source = 0; source < args.split; ++source) {
#pragma unroll
    for (int i = 0; i < Gemm::kHalves * kFours; ++i) {
      const float4 four =
          sm90::load_cluster_float4(sm90::map_to_rank(shared.sums(warp, i), static_cast<uint32_t>(source)));
      float* const of = sums[i / kFours] + i % kFours * 4;
      of[0] += four.x;
      of[1] += four.y;
      of[2] += four.z;
      of[3] += four.w;
    }
  }
  return true;
}

template <typename Gemm, int kVariant>
__device__ __forceinline__ void consume(const ScaledArgs& args, const ScaledShared<Gemm>& shared) {
  const int warp = sm90::warp_uniform(threadIdx.x / 32);
  sm90::RingPosition at(Gemm::kStages);
  if (kVariant == 1 && warp >= 4) sm90::named_barrier_arrive(2, Gemm::kConsumers);
  if (kVariant == 2 && warp >= 4) sm90::named_barrier_sync(2, Gemm::kConsumers);
  for (ScaledTiles tiles(args); !tiles.done(); tiles.advance()) {
    ScaledTile tile = tiles.tile<Gemm>();
    ScaledSums<Gemm> sums;
    multiply<Gemm, kVariant>(args, shared, tiles, tile, at, sums);
    tile.row += warp * Gemm::kBoxRows;
    if (args.split > 1 && !add_sums_of_cluster<Gemm>(args, shared, tiles.rank, warp, sums)) continue;
    store_tile<Gemm>(args, sums, shared.box(warp), tile);
  }
  if (threadIdx.x % 32 == 0) sm90::tma_store_wait_read<0>();
  __syncwarp();
}

#endif

template <typename Gemm, int kVariant = 0>
__global__ void __launch_bounds__(Gemm::kThreads, 1) scaled_gemm_kernel(const __grid_constant__ ScaledArgs args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ uint8_t raw_shared[];
  const ScaledShared<Gemm> shared(raw_shared);
  const bool in_cluster = args.pair * args.split > 1;
  allow_next_kernel();
  if (threadIdx.x == 0) {
    sm90::prefetch_tensor_map(&args.a);
    sm90::prefetch_tensor_map(&args.weight);
    if (Gemm::kGated) sm90::prefetch_tensor_map(&args.up_weight);
    sm90::prefetch_tensor_map(&args.out);
    for (int stage = 0; stage < Gemm::kStages; ++stage) {
      sm90::mbarrier_init(shared.full(stage), 1);
      sm90::mbarrier_init(shared.empty(stage), args.pair * (Gemm::kConsumers / 32));
    }
    sm90::fence_mbarrier_init();
  }
  __syncthreads();
  if (in_cluster) sm90::cluster_sync();  // nobody writes to a CTA whose barriers are not there yet
  if (threadIdx.x >= Gemm::kConsumers) {
    sm90::shrink_registers<Gemm::kProducerRegisters>();
    if (threadIdx.x == Gemm::kConsumers) produce<Gemm>(args, shared);
    __syncwarp();
    if (args.split > 1) sm90::cluster_sync();  // where the others have laid down their sums
  } else {
    sm90::grow_registers<Gemm::kConsumerRegisters>();
    consume<Gemm, kVariant>(args, shared);
  }
  if (in_cluster) sm90::cluster_sync();  // no CTA exits while others still write to it, or read from it
#endif
}

}  // namespace fused_mlp
