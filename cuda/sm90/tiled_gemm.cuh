// The GEMM for many rows: persistent CTAs of one producer warp, which keeps a ring of shared memory stages filled by
// TMA, and two consumer warpgroups, each multiplying 64 rows of A with the whole B tile by wgmma.
//
// A gated problem is the plain one with a B tile filled from two tensors, gate rows in the first half, up rows in the
// second: accumulators i and i + kBlockN / 4 of a thread are then gate and up of one output element.
#pragma once

#include <type_traits>

#include "epilogue.cuh"
#include "ptx.cuh"
#include "ring.cuh"
#include "wgmma.cuh"

namespace fused_mlp::sm90 {

struct TiledGemmArgs {
  CUtensorMap a;
  CUtensorMap weight;
  CUtensorMap up_weight;
  CUtensorMap out;
  EpilogueArgs epilogue;
  int n;
  int k_blocks;
  int tiles_m;  // of kMulticast * kBlockM rows
  int tiles_n;
  bool follows_gemm;
};

template <typename Element_, bool kGated_, int kBlockN_, int kMulticast_, int kSplitK_>
struct TiledGemm {
  using Element = Element_;
  static constexpr bool kGated = kGated_;
  static constexpr int kBlockM = 128;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kBlockK = 64;
  static constexpr int kMulticast = kMulticast_;
  static constexpr int kSplitK = kSplitK_;
  static constexpr int kCluster = kMulticast * kSplitK;
  static_assert(kMulticast == 1 || kSplitK == 1, "a cluster shares weights or an output tile, not both");

  static constexpr int kTileN = kGated ? kBlockN / 2 : kBlockN;  // columns of the output
  static constexpr int kConsumers = 2;
  static constexpr int kThreads = (kConsumers + 1) * 128;

  // The output leaves through shared memory, kStepN columns at a time, in TMA boxes of kBoxN columns.
  static constexpr int kStepN = kTileN / kSplitK % 64 == 0 ? 64 : kTileN / kSplitK;
  static constexpr int kBoxN = kStepN % 64 == 0 ? 64 : kStepN % 32 == 0 ? 32 : 16;
  static constexpr int kSteps = kTileN / kStepN;
  static constexpr int kStoreBuffers = kSteps / kSplitK > 1 ? 2 : 1;
  static_assert(kSteps * kStepN == kTileN && kStepN % kBoxN == 0 && kSteps % kSplitK == 0);

  static constexpr int kBytesA = kBlockM * kBlockK * sizeof(Element);
  static constexpr int kBytesB = kBlockN * kBlockK * sizeof(Element);
  static constexpr int kStageBytes = kBytesA + kBytesB;
  static constexpr int kStoreBytes = 64 * kStepN * sizeof(Element);
  static constexpr int kBarrierBytes = 256;
  static constexpr int kSharedLimit = 227 * 1024;
  static constexpr int kAlignment = 1024;
  static constexpr int kFixedBytes = kConsumers * kStoreBuffers * kStoreBytes + kBarrierBytes + kAlignment;
  static constexpr int kStages = (kSharedLimit - kFixedBytes) / kStageBytes < 8 ? (kSharedLimit - kFixedBytes) / kStageBytes : 8;
  static constexpr int kSharedBytes = kStages * kStageBytes + kFixedBytes;
  static_assert(kStoreBytes % kAlignment == 0 && kStageBytes % kAlignment == 0);
};

#ifndef GROUP_M
#define GROUP_M 8
#endif
#ifndef SKEW
#define SKEW 2
#endif

// Tiles in groups of kGroupM tile rows, so that the tiles in flight at any time share few rows of A and of B in L2.
struct TileOrder {
  static constexpr int kGroupM = GROUP_M;
  int tiles_m;
  int tiles_n;

  __device__ __forceinline__ int count() const { return tiles_m * tiles_n; }
  __device__ __forceinline__ int2 operator[](int index) const {
    const int group = index / (kGroupM * tiles_n);
    const int in_group = index - group * kGroupM * tiles_n;
    const int rows = min(kGroupM, tiles_m - group * kGroupM);
    return {group * kGroupM + in_group % rows, in_group / rows};
  }
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <typename Gemm>
struct TiledGemmShared {
  uint8_t* ring;
  uint8_t* store;
  uint64_t* full;
  uint64_t* empty;

  __device__ __forceinline__ explicit TiledGemmShared(uint8_t* raw) {
    ring = raw + (-shared_address(raw) & (Gemm::kAlignment - 1));
    store = ring + Gemm::kStages * Gemm::kStageBytes;
    full = reinterpret_cast<uint64_t*>(store + Gemm::kConsumers * Gemm::kStoreBuffers * Gemm::kStoreBytes);
    empty = full + Gemm::kStages;
  }
  __device__ __forceinline__ uint8_t* a(int stage) const { return ring + stage * Gemm::kStageBytes; }
  __device__ __forceinline__ uint8_t* b(int stage) const { return a(stage) + Gemm::kBytesA; }
};

// The k blocks of CTA `rank` where kSplitK CTAs share a tile: [begin, end).
template <typename Gemm>
__device__ __forceinline__ int2 k_range(int k_blocks, int rank) {
  if constexpr (Gemm::kSplitK == 1) return {0, k_blocks};
  return {rank * k_blocks / Gemm::kSplitK, (rank + 1) * k_blocks / Gemm::kSplitK};
}

template <typename Gemm>
__device__ __forceinline__ void load_weights(const TiledGemmArgs& args, uint64_t* full, uint8_t* b, int column, int tile_n,
                                             int rank) {
  constexpr int kHalf = Gemm::kBlockN / 2;
  constexpr int kHalfBytes = Gemm::kBytesB / 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const CUtensorMap* map = Gemm::kGated && half == 1 ? &args.up_weight : &args.weight;
    const int row = Gemm::kGated ? tile_n * kHalf : tile_n * Gemm::kBlockN + half * kHalf;
    if constexpr (Gemm::kMulticast == 1) {
      tma_load(map, full, b + half * kHalfBytes, column, row);
    } else {
      static_assert(Gemm::kMulticast == 2, "each CTA of the pair loads one half for both");
      if (half == rank) tma_load_multicast(map, full, b + half * kHalfBytes, column, row, 0b11);
    }
  }
}

template <typename Gemm>
__device__ __forceinline__ void produce(const TiledGemmArgs& args, const TiledGemmShared<Gemm>& shared, int rank) {
  const TileOrder tiles{args.tiles_m, args.tiles_n};
  const int2 k = k_range<Gemm>(args.k_blocks, rank);
  RingPosition<Gemm::kStages> at;
  for (int index = blockIdx.x / Gemm::kCluster; index < tiles.count(); index += gridDim.x / Gemm::kCluster) {
    const int2 tile = tiles[index];
    const int row = Gemm::kBlockM * (Gemm::kMulticast == 1 ? tile.x : tile.x * Gemm::kMulticast + rank);
    for (int block = k.x; block < k.y; ++block, at.advance()) {
      uint64_t* full = shared.full + at.stage;
      mbarrier_wait(shared.empty + at.stage, at.parity ^ 1);
      mbarrier_arrive_expect(full, Gemm::kStageBytes);
      tma_load(&args.a, full, shared.a(at.stage), block * Gemm::kBlockK, row);
      load_weights<Gemm>(args, full, shared.b(at.stage), block * Gemm::kBlockK, tile.y, rank);
    }
  }
}

template <typename Gemm>
__device__ __forceinline__ void release(const TiledGemmShared<Gemm>& shared, int stage, int lane) {
  if constexpr (Gemm::kMulticast == 1) {
    if (lane == 0) mbarrier_arrive(shared.empty + stage);
  } else {
    if (lane < Gemm::kMulticast) mbarrier_arrive_at_rank(shared.empty + stage, lane);
  }
}

// accumulator = the product over the tile's k blocks, of this warpgroup's 64 rows.
template <typename Gemm>
__device__ __forceinline__ void multiply(const TiledGemmShared<Gemm>& shared, RingPosition<Gemm::kStages>& at,
                                         float (&accumulator)[Gemm::kBlockN / 2], int k_blocks, int consumer,
                                         int lane) {
  constexpr int kSkewBarrier = 3;
  if (SKEW && consumer == 1) named_barrier_sync(kSkewBarrier, Gemm::kConsumers * 128);
  int previous = 0;
  for (int block = 0; block < k_blocks; ++block) {
    mbarrier_wait(shared.full + at.stage, at.parity);
    const uint64_t a = wgmma_descriptor(shared.a(at.stage) + consumer * (Gemm::kBytesA / Gemm::kConsumers));
    const uint64_t b = wgmma_descriptor(shared.b(at.stage));
    fence_accumulator(accumulator);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Gemm::kBlockK / kWgmmaK; ++step) {
      Wgmma<typename Gemm::Element, Gemm::kBlockN>::multiply(accumulator, a + step * kDescriptorStepK,
                                                             b + step * kDescriptorStepK, block > 0 || step > 0);
    }
    wgmma_commit();
    fence_accumulator(accumulator);
    wgmma_wait<1>();
    if (block > 0) release(shared, previous, lane);
    previous = at.stage;
    at.advance();
    if (SKEW && consumer == 0 && block == min(SKEW, k_blocks) - 1) named_barrier_arrive(kSkewBarrier, Gemm::kConsumers * 128);
  }
  wgmma_wait<0>();
  fence_accumulator(accumulator);
  if (k_blocks > 0) release(shared, previous, lane);
}

// Where a cluster splits k: every CTA gets the sums of its own share of the tile's columns, added in the order of the
// ranks, through the others' rings (free by now: a cluster computes one tile).
template <typename Gemm>
__device__ __forceinline__ void reduce_across_cluster(const TiledGemmShared<Gemm>& shared,
                                                      float (&accumulator)[Gemm::kBlockN / 2], int rank) {
  constexpr int kParts = Gemm::kGated ? 2 : 1;
  constexpr int kShare = Gemm::kBlockN / 2 / kParts / Gemm::kSplitK;  // accumulators of one part that one CTA finishes
  constexpr int kThreads = Gemm::kConsumers * 128;
  static_assert(kShare % 4 == 0);
  const auto slot = [&](int source, int part, int i) {
    return ((source * kParts + part) * kShare / 4 + i / 4) * kThreads * 16 + threadIdx.x * 16;
  };
  cluster_sync();
#pragma unroll
  for (int owner = 0; owner < Gemm::kSplitK; ++owner) {
    if (owner == rank) continue;
    const uint32_t base = map_to_rank(shared_address(shared.ring), owner);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int i = 0; i < kShare; i += 4) {
        const float* v = accumulator + part * Gemm::kBlockN / 4 + owner * kShare + i;
        store_cluster_float4(base + slot(rank, part, i), make_float4(v[0], v[1], v[2], v[3]));
      }
    }
  }
  cluster_sync();
#pragma unroll
  for (int owner = 0; owner < Gemm::kSplitK; ++owner) {
    if (owner != rank) continue;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int i = 0; i < kShare; i += 4) {
        float* v = accumulator + part * Gemm::kBlockN / 4 + owner * kShare + i;
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int source = 0; source < Gemm::kSplitK; ++source) {
          const float4 term = source == rank ? make_float4(v[0], v[1], v[2], v[3])
                                             : *reinterpret_cast<const float4*>(shared.ring + slot(source, part, i));
          sum.x += term.x, sum.y += term.y, sum.z += term.z, sum.w += term.w;
        }
        v[0] = sum.x, v[1] = sum.y, v[2] = sum.z, v[3] = sum.w;
      }
    }
  }
}

// The byte at `column` (a multiple of 8) of a row of a TMA box of kBoxN columns, swizzled over the whole row.
template <int kBoxN>
__device__ __forceinline__ uint32_t box_offset(int row, int column) {
  const uint32_t offset = (row * kBoxN + column) * 2;
  return offset ^ ((offset >> 3) & (kBoxN * 2 - 16));
}

// Finishes kStepN columns from `step * kStepN` on of this warpgroup's 64 rows and sends them off.
template <typename Gemm>
__device__ __forceinline__ void store_step(const TiledGemmArgs& args, float (&accumulator)[Gemm::kBlockN / 2],
                                           uint8_t* buffer, int step, int row, int tile_column, int consumer) {
  using Element = typename Gemm::Element;
  constexpr int kCount = Gemm::kStepN / 2;  // results of a thread
  const int thread = threadIdx.x % 128;
  const int lane = thread % 32;
  const int barrier = 1 + consumer;
  const int column = tile_column + step * Gemm::kStepN;

  float value[kCount];
#pragma unroll
  for (int j = 0; j < kCount; j += 4) {
    const float2 bias = load_bias_pair<Element>(args.epilogue.bias, column + j * 2 + lane % 4 * 2, args.n);
#pragma unroll
    for (int i = 0; i < 4; ++i) value[j + i] = accumulator[step * kCount + j + i] + (i % 2 == 0 ? bias.x : bias.y);
  }
  activate(value, args.epilogue.activation);
  if constexpr (Gemm::kGated) {
#pragma unroll
    for (int j = 0; j < kCount; j += 4) {
      const float2 bias = load_bias_pair<Element>(args.epilogue.up_bias, column + j * 2 + lane % 4 * 2, args.n);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        value[j + i] *= accumulator[Gemm::kBlockN / 4 + step * kCount + j + i] + (i % 2 == 0 ? bias.x : bias.y);
      }
    }
  }

  if (thread == 0) tma_store_wait_read<Gemm::kStoreBuffers - 1>();
  named_barrier_sync(barrier, 128);
#pragma unroll
  for (int j = 0; j < kCount; j += 8) {  // 16 columns
    const int local_column = j * 2 + lane / 16 * 8;
    const int local_row = thread / 32 * 16 + lane % 16;
    uint8_t* box = buffer + j * 2 / Gemm::kBoxN * (64 * Gemm::kBoxN * 2);
    store_matrix_x4(shared_address(box) + box_offset<Gemm::kBoxN>(local_row, local_column % Gemm::kBoxN),
                    round_pair<Element>(value[j], value[j + 1]), round_pair<Element>(value[j + 2], value[j + 3]),
                    round_pair<Element>(value[j + 4], value[j + 5]), round_pair<Element>(value[j + 6], value[j + 7]));
  }
  fence_shared_to_async();
  named_barrier_sync(barrier, 128);
  if (thread == 0) {
#pragma unroll
    for (int box = 0; box < Gemm::kStepN / Gemm::kBoxN; ++box) {
      tma_store(&args.out, buffer + box * (64 * Gemm::kBoxN * 2), column + box * Gemm::kBoxN, row);
    }
    tma_store_commit();
  }
}

template <typename Gemm>
__device__ __forceinline__ void consume(const TiledGemmArgs& args, const TiledGemmShared<Gemm>& shared, int rank) {
  const TileOrder tiles{args.tiles_m, args.tiles_n};
  const int consumer = threadIdx.x / 128;
  const int lane = threadIdx.x % 32;
  const int2 k = k_range<Gemm>(args.k_blocks, rank);
  uint8_t* store = shared.store + consumer * Gemm::kStoreBuffers * Gemm::kStoreBytes;
  RingPosition<Gemm::kStages> at;
  float accumulator[Gemm::kBlockN / 2];
  for (int index = blockIdx.x / Gemm::kCluster; index < tiles.count(); index += gridDim.x / Gemm::kCluster) {
    const int2 tile = tiles[index];
    const int row = Gemm::kBlockM * (Gemm::kMulticast == 1 ? tile.x : tile.x * Gemm::kMulticast + rank) + consumer * 64;
    multiply<Gemm>(shared, at, accumulator, k.y - k.x, consumer, lane);
    if constexpr (Gemm::kSplitK > 1) reduce_across_cluster<Gemm>(shared, accumulator, rank);
#pragma unroll
    for (int step = 0; step < Gemm::kSteps; ++step) {
      if (Gemm::kSplitK > 1 && step / (Gemm::kSteps / Gemm::kSplitK) != rank) continue;
      store_step<Gemm>(args, accumulator, store + step % Gemm::kStoreBuffers * Gemm::kStoreBytes, step, row,
                       tile.y * Gemm::kTileN, consumer);
    }
  }
  if (threadIdx.x % 128 == 0) tma_store_wait_read<0>();
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <typename Gemm>
__global__ void __launch_bounds__(Gemm::kThreads, 1) tiled_gemm_kernel(const __grid_constant__ TiledGemmArgs args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ uint8_t raw_shared[];
  const TiledGemmShared<Gemm> shared(raw_shared);
  const int rank = Gemm::kCluster == 1 ? 0 : cluster_rank();
  const int warp = threadIdx.x / 32;

  if (threadIdx.x == 0) {
    prefetch_tensor_map(&args.a);
    prefetch_tensor_map(&args.weight);
    if (Gemm::kGated) prefetch_tensor_map(&args.up_weight);
    prefetch_tensor_map(&args.out);
    for (int stage = 0; stage < Gemm::kStages; ++stage) {
      mbarrier_init(shared.full + stage, 1);
      mbarrier_init(shared.empty + stage, Gemm::kConsumers * 4 * Gemm::kMulticast);  // each warp, in each CTA
    }
    fence_mbarrier_init();
  }
  if constexpr (Gemm::kCluster > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  if (args.follows_gemm) wait_for_previous_kernel();
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
  if constexpr (Gemm::kMulticast > 1) cluster_sync();  // no CTA leaves while its pair may still signal its barriers
#endif
}

}  // namespace fused_mlp::sm90
