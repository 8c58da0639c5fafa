// The GEMM for many rows: persistent CTAs of one producer warp, which keeps a ring of shared memory stages filled by
// TMA, and two consumer warpgroups, which multiply by wgmma. They take a tile each in turn (ping-pong: one finishes its
// tile while the other has the tensor cores), or 64 rows each of every tile (cooperative: larger tiles, less traffic).
//
// A gated problem is the plain one with a B tile filled from two tensors, gate rows in the first half, up rows in the
// second: accumulators i and i + kBlockN / 4 of a thread are then gate and up of one output element.
#pragma once

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

constexpr int at_most(int limit, int value) { return value < limit ? value : limit; }

template <typename Element_, bool kGated_, int kBlockN_, bool kPingPong_, int kMulticast_, int kSplitK_>
struct TiledGemm {
  using Element = Element_;
  static constexpr bool kGated = kGated_;
  static constexpr int kBlockM = 128;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kBlockK = 64;
  static constexpr bool kPingPong = kPingPong_;
  static constexpr int kMulticast = kMulticast_;
  static constexpr int kSplitK = kSplitK_;
  static constexpr int kCluster = kMulticast * kSplitK;
  static_assert(!kPingPong || kSplitK == 1);

  static constexpr int kParts = kGated ? 2 : 1;     // gate and up
  static constexpr int kTileN = kBlockN / kParts;   // columns of the output
  static constexpr int kShareN = kTileN / kSplitK;  // of which one CTA finishes these
  static constexpr int kBoxesB = kParts * kSplitK > kMulticast ? kParts * kSplitK : kMulticast;
  static constexpr int kBoxRowsB = kBlockN / kBoxesB;
  static constexpr int kConsumers = 2;
  static constexpr int kThreads = (kConsumers + 1) * 128;
  static constexpr int kConsumersOfTile = kPingPong ? 1 : kConsumers;
  static constexpr int kRows = kBlockM / kConsumersOfTile;  // of a tile, multiplied by one warpgroup
  static constexpr int kMmas = kRows / 64;
  static constexpr int kAccumulators = kBlockN / 2;  // of a thread, for 64 rows

  // The output leaves through shared memory, kStepN columns of a warp's 16 rows at a time, in TMA boxes of kBoxN
  // columns. Every warp has buffers of its own: warps that waited for each other would be ready at the same time too.
  static constexpr bool kCrowded = kMmas * kAccumulators > 128;  // few registers are left for the epilogue
  static constexpr int kStepN = kCrowded ? 32 : kShareN % 64 == 0 ? 64 : kShareN;
  static constexpr int kBoxN = kStepN % 64 == 0 ? 64 : kStepN % 32 == 0 ? 32 : 16;
  static constexpr int kBoxRows = 16;
  // The code for a chunk of the columns is reused for the others, and for the other rows: it must fit the innermost
  // instruction cache (12 KB), or the epilogue waits for instructions more than it computes.
  static constexpr int kChunks = !kGated && kShareN / kStepN >= 4 ? 2 : 1;
  static constexpr int kChunkN = kShareN / kChunks;
  static constexpr int kSteps = kChunkN / kStepN;  // of a chunk
  static_assert(kChunks * kSteps * kStepN == kShareN && kStepN % kBoxN == 0);

  static constexpr int kBytesA = kBlockM * kBlockK * sizeof(Element);
  static constexpr int kBytesB = kBlockN * kBlockK * sizeof(Element);
  static constexpr int kStageBytes = kBytesA + kBytesB;
  static constexpr int kBoxBytes = kBoxRows * kBoxN * sizeof(Element);
  static constexpr int kStoreBytes = kBoxRows * kStepN * sizeof(Element);
  static constexpr int kBarrierBytes = 256;
  static constexpr int kAlignment = 1024;
  static constexpr int kTileBiasBytes = kParts * kShareN * 4;
  static constexpr int kSharedBudget =
      227 * 1024 - kBarrierBytes - kTileBiasBytes * kConsumers / kConsumersOfTile - kAlignment;
  // Stages first; then as many buffers as have room, up to the stores of a tile.
  static constexpr int kStoresOfTile = kMmas * kChunks * kSteps;
  static constexpr int kBufferBytes = kConsumers * 4 * kStoreBytes;
  static constexpr int kStages = at_most(8, (kSharedBudget - at_most(2, kStoresOfTile) * kBufferBytes) / kStageBytes);
  static constexpr int kStoreBuffers =
      at_most(at_most(4, kStoresOfTile), (kSharedBudget - kStages * kStageBytes) / kBufferBytes);
  static constexpr int kSharedBytes = 227 * 1024 - kSharedBudget + kStages * kStageBytes + kStoreBuffers * kBufferBytes;
  static_assert(kStageBytes % kAlignment == 0 && kBoxBytes % (8 * kBoxN * sizeof(Element)) == 0);
};

// Tiles in groups of kGroupM tile rows, so that the tiles in flight at any time share few rows of A and of B in L2.
struct TileOrder {
  static constexpr int kGroupM = 8;
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

// Addresses in shared memory.
template <typename Gemm>
struct TiledGemmShared {
  uint32_t ring;

  __device__ __forceinline__ explicit TiledGemmShared(const void* raw)
      : ring((shared_address(raw) + Gemm::kAlignment - 1) & ~(Gemm::kAlignment - 1)) {}
  __device__ __forceinline__ uint32_t a(int stage) const { return ring + stage * Gemm::kStageBytes; }
  __device__ __forceinline__ uint32_t b(int stage) const { return a(stage) + Gemm::kBytesA; }
  __device__ __forceinline__ uint32_t store(int warp) const {
    return ring + Gemm::kStages * Gemm::kStageBytes + warp * Gemm::kStoreBuffers * Gemm::kStoreBytes;
  }
  __device__ __forceinline__ uint32_t bias(int group) const {
    return store(Gemm::kConsumers * 4) + group * Gemm::kTileBiasBytes;
  }
  __device__ __forceinline__ uint32_t full(int stage) const {
    return bias(Gemm::kConsumers / Gemm::kConsumersOfTile) + stage * 8;
  }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(Gemm::kStages + stage); }
};

// A CTA's part in its cluster: kMulticast CTAs with adjacent tiles of rows share their weights; kSplitK such groups
// share the tiles, each with its part of k.
template <typename Gemm>
struct ClusterPlace {
  int m;
  int k;

  __device__ __forceinline__ explicit ClusterPlace(int rank) : m(rank % Gemm::kMulticast), k(rank / Gemm::kMulticast) {}
  __device__ __forceinline__ int rank_of(int other_m, int other_k) const {
    return other_k * Gemm::kMulticast + other_m;
  }
  __device__ __forceinline__ int row(int tile_m) const { return (tile_m * Gemm::kMulticast + m) * Gemm::kBlockM; }
  // The CTA's k blocks: [x, y).
  __device__ __forceinline__ int2 k_range(int k_blocks) const {
    return {k * k_blocks / Gemm::kSplitK, (k + 1) * k_blocks / Gemm::kSplitK};
  }
};

// A CTA that splits k with others gets the columns that it will finish first, then those of the next ranks in turn.
template <typename Gemm>
__device__ __forceinline__ void load_weights(const TiledGemmArgs& args, uint32_t full, uint32_t b, int column,
                                             int tile_n, ClusterPlace<Gemm> place) {
  constexpr int kBoxesOfPart = Gemm::kBoxesB / Gemm::kParts;
#pragma unroll
  for (int box = 0; box < Gemm::kBoxesB; ++box) {
    const CUtensorMap* map = box < kBoxesOfPart ? &args.weight : &args.up_weight;
    const int share = Gemm::kSplitK == 1 ? box % kBoxesOfPart : (box + place.k) % Gemm::kSplitK;
    const int row = tile_n * Gemm::kTileN + share * Gemm::kBoxRowsB;
    const uint32_t destination = b + box * (Gemm::kBytesB / Gemm::kBoxesB);
    if constexpr (Gemm::kMulticast == 1) {
      tma_load(map, full, destination, column, row);
    } else {
      const uint16_t sharers = ((1 << Gemm::kMulticast) - 1) << place.rank_of(0, place.k);
      if (box % Gemm::kMulticast == place.m) tma_load_multicast(map, full, destination, column, row, sharers);
    }
  }
}

template <typename Gemm>
__device__ __forceinline__ void produce(const TiledGemmArgs& args, const TiledGemmShared<Gemm>& shared,
                                        ClusterPlace<Gemm> place) {
  const TileOrder tiles{args.tiles_m, args.tiles_n};
  const int2 k = place.k_range(args.k_blocks);
  RingPosition at(Gemm::kStages);
  for (int index = blockIdx.x / Gemm::kCluster; index < tiles.count(); index += gridDim.x / Gemm::kCluster) {
    const int2 tile = tiles[index];
    const int row = place.row(tile.x);
    for (int block = k.x; block < k.y; ++block, at.advance()) {
      const uint32_t full = shared.full(at.stage);
      mbarrier_wait(shared.empty(at.stage), at.parity ^ 1);
      mbarrier_arrive_expect(full, Gemm::kStageBytes);
      tma_load(&args.a, full, shared.a(at.stage), block * Gemm::kBlockK, row);
      load_weights<Gemm>(args, full, shared.b(at.stage), block * Gemm::kBlockK, tile.y, place);
    }
  }
}

template <typename Gemm>
__device__ __forceinline__ void release(const TiledGemmShared<Gemm>& shared, ClusterPlace<Gemm> place, int stage) {
  const int lane = threadIdx.x % 32;
  if constexpr (Gemm::kMulticast == 1) {
    if (lane == 0) mbarrier_arrive(shared.empty(stage));
  } else {
    if (lane < Gemm::kMulticast) mbarrier_arrive_at_rank(shared.empty(stage), place.rank_of(lane, place.k));
  }
}

template <typename Gemm>
using Accumulator = float[Gemm::kMmas][Gemm::kAccumulators];

// accumulator = the product over k_blocks blocks, of this warpgroup's rows from `first_row` of the tile on. Calls
// on_last_block() once all the blocks have arrived.
template <typename Gemm, typename OnLastBlock>
__device__ __forceinline__ void multiply(const TiledGemmShared<Gemm>& shared, ClusterPlace<Gemm> place,
                                         RingPosition& at, Accumulator<Gemm>& accumulator, int k_blocks, int first_row,
                                         OnLastBlock&& on_last_block) {
  using Mma = Wgmma<typename Gemm::Element, Gemm::kBlockN>;
  constexpr int kRowBytes = Gemm::kBlockK * sizeof(typename Gemm::Element);
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
    const uint32_t a = shared.a(at.stage) + first_row * kRowBytes;
    const uint32_t b = shared.b(at.stage);
    fence();
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Gemm::kBlockK / kWgmmaK; ++step) {
#pragma unroll
      for (int mma = 0; mma < Gemm::kMmas; ++mma) {
        Mma::multiply(accumulator[mma], wgmma_descriptor(a + mma * 64 * kRowBytes + step * kWgmmaStepBytes),
                      wgmma_descriptor(b + step * kWgmmaStepBytes), block > 0 || step > 0);
      }
    }
    wgmma_commit();
    fence();
    wgmma_wait<1>();
    if (block > 0) release(shared, place, previous);
    previous = at.stage;
    at.advance();
  }
  wgmma_wait<0>();
  fence();
  release(shared, place, previous);
}

// Where a cluster splits k: every CTA gets the sums of the columns it finishes, added in a fixed order, through its
// ring (free by now: a cluster computes one tile).
template <typename Gemm>
__device__ __forceinline__ void reduce_across_cluster(const TiledGemmShared<Gemm>& shared, ClusterPlace<Gemm> place,
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
    const int owner = place.rank_of(place.m, (place.k + distance) % Gemm::kSplitK);
    const uint32_t base = map_to_rank(shared.ring, owner);
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

// Where in a TMA box this thread's first stmatrix row goes. Rows of a TMA box are kBoxN columns wide and swizzled
// over their whole width; XOR with 2 c then leads c columns (a multiple of 16) to the right.
template <typename Gemm>
__device__ __forceinline__ uint32_t store_offset() {
  const int lane = threadIdx.x % 32;
  const uint32_t offset = (lane % 16 * Gemm::kBoxN + lane / 16 * 8) * 2;
  return offset ^ ((offset >> 3) & (Gemm::kBoxN * 2 - 16));
}

// The biases of a tile's columns, on their way to shared memory: read early, written when the tile before is done.
template <typename Gemm>
struct TileBias {
  static constexpr int kCount = Gemm::kParts * Gemm::kShareN;
  static constexpr int kThreads = Gemm::kConsumersOfTile * 128;
  static constexpr int kPerThread = (kCount + kThreads - 1) / kThreads;
  float values[kPerThread];

  __device__ __forceinline__ static int index(int i) { return threadIdx.x % kThreads + i * kThreads; }

  __device__ __forceinline__ void load(const TiledGemmArgs& args, int first_column) {
    using Element = typename Gemm::Element;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const void* bias = index(i) < Gemm::kShareN ? args.epilogue.bias : args.epilogue.up_bias;
      const int column = min(first_column + index(i) % Gemm::kShareN, args.n - 1);  // past the end nothing is stored
      values[i] = bias == nullptr ? 0.0f : to_float(__ldg(static_cast<const Element*>(bias) + column));
    }
  }

  __device__ __forceinline__ void store(uint32_t shared) const {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (index(i) < kCount) store_shared_float(shared + index(i) * 4, values[i]);
    }
  }
};

// Calls combine(value, the accumulator plus its bias, if there are any in shared memory) for a thread's accumulators of
// a step, from `first` on.
template <typename Gemm, typename Combine>
__device__ __forceinline__ void for_each_biased(float (&value)[Gemm::kStepN / 2],
                                                const float (&accumulator)[Gemm::kAccumulators], int first, bool biased,
                                                uint32_t shared, Combine&& combine) {
  if (biased) {
#pragma unroll
    for (int i = 0; i < Gemm::kStepN / 2; i += 4) {
      const float2 pair = load_shared_float2(shared + (i * 2 + threadIdx.x % 4 * 2) * 4);
#pragma unroll
      for (int j = i; j < i + 4; ++j) combine(value[j], accumulator[first + j] + (j % 2 == 0 ? pair.x : pair.y));
    }
  } else {
#pragma unroll
    for (int i = 0; i < Gemm::kStepN / 2; ++i) combine(value[i], accumulator[first + i]);
  }
}

template <typename Gemm>
__device__ __forceinline__ void write_boxes(const float (&value)[Gemm::kStepN / 2], uint32_t store) {
  using Element = typename Gemm::Element;
  const uint32_t thread_store = store + store_offset<Gemm>();
#pragma unroll
  for (int j = 0; j < Gemm::kStepN / 2; j += 8) {  // 16 columns
    const int box = j * 2 / Gemm::kBoxN;
    store_matrix_x4((thread_store ^ j * 2 % Gemm::kBoxN * 2) + box * Gemm::kBoxBytes,
                    round_pair<Element>(value[j], value[j + 1]), round_pair<Element>(value[j + 2], value[j + 3]),
                    round_pair<Element>(value[j + 4], value[j + 5]), round_pair<Element>(value[j + 6], value[j + 7]));
  }
}

// Sends what the warp wrote to (row, column) of the output.
template <typename Gemm>
__device__ __forceinline__ void send_boxes(const TiledGemmArgs& args, uint32_t store, int row, int column) {
  fence_shared_to_async();
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
#pragma unroll
    for (int box = 0; box < Gemm::kStepN / Gemm::kBoxN; ++box) {
      tma_store(&args.out, store + box * Gemm::kBoxBytes, column + box * Gemm::kBoxN, row);
    }
    tma_store_commit();
  }
}

// Stores the warp's rows of the tile, 16 of every 64, leaving the accumulators undefined.
template <typename Gemm, Activation A>
__device__ __forceinline__ void store_tile(const TiledGemmArgs& args, Accumulator<Gemm>& accumulator,
                                           uint32_t tile_bias, uint32_t stores, int& buffer, int first_row,
                                           int first_column) {
  constexpr int kCount = Gemm::kStepN / 2;  // results of a thread and step
  constexpr int kShift = Gemm::kAccumulators / Gemm::kChunks;
  constexpr int kLastChunk = Gemm::kMmas * Gemm::kChunks - 1;
#pragma unroll 1
  for (int chunk = 0; chunk <= kLastChunk; ++chunk) {
    const int row = first_row + chunk / Gemm::kChunks * 64;
    const int chunk_column = chunk % Gemm::kChunks * Gemm::kChunkN;
    const int column = first_column + chunk_column;
    const uint32_t bias = tile_bias + chunk_column * 4;
    uint32_t store = 0;
#pragma unroll
    for (int step = 0; step < Gemm::kSteps; ++step) {
      const int step_column = step * Gemm::kStepN;
      float value[kCount];
      for_each_biased<Gemm>(value, accumulator[0], step * kCount, args.epilogue.bias != nullptr, bias + step_column * 4,
                            [](float& result, float gate) { result = gate; });
      activate<A, typename Gemm::Element>(value);
      if constexpr (Gemm::kGated) {
        for_each_biased<Gemm>(value, accumulator[0], Gemm::kAccumulators / 2 + step * kCount,
                              args.epilogue.up_bias != nullptr, bias + (Gemm::kShareN + step_column) * 4,
                              [](float& result, float up) { result *= up; });
      }
      // The boxes of the step before are sent only now: the fence does not wait for their writing.
      if (step > 0) send_boxes<Gemm>(args, store, row, column + step_column - Gemm::kStepN);
      if (threadIdx.x % 32 == 0) tma_store_wait_read<Gemm::kStoreBuffers - 1>();
      __syncwarp();
      store = stores + buffer * Gemm::kStoreBytes;
      buffer = buffer + 1 == Gemm::kStoreBuffers ? 0 : buffer + 1;
      write_boxes<Gemm>(value, store);
    }
    send_boxes<Gemm>(args, store, row, column + (Gemm::kSteps - 1) * Gemm::kStepN);
#pragma unroll
    for (int i = 0; i < kLastChunk * kShift; ++i) {  // the next chunk's accumulators take the place of this one's
      const int next = i + kShift;
      accumulator[i / Gemm::kAccumulators][i % Gemm::kAccumulators] =
          accumulator[next / Gemm::kAccumulators][next % Gemm::kAccumulators];
    }
  }
}

template <typename Gemm>
__device__ __forceinline__ void consume(const TiledGemmArgs& args, const TiledGemmShared<Gemm>& shared,
                                        ClusterPlace<Gemm> place) {
  const TileOrder tiles{args.tiles_m, args.tiles_n};
  const int warp = warp_uniform(threadIdx.x / 32);
  const int consumer = warp / 4;
  const int group = consumer / Gemm::kConsumersOfTile;  // of the threads that share a tile
  const int first_row = Gemm::kPingPong ? 0 : consumer * Gemm::kRows;
  const int2 k = place.k_range(args.k_blocks);
  const int k_blocks = k.y - k.x;
  const int clusters = gridDim.x / Gemm::kCluster;
  const bool biased = args.epilogue.bias != nullptr || args.epilogue.up_bias != nullptr;
  int buffer = 0;  // the next store's
  RingPosition at(Gemm::kStages);
  int index = blockIdx.x / Gemm::kCluster;
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
    const int2 tile = tiles[index];
    const int column = tile.y * Gemm::kTileN + place.k * Gemm::kShareN;
    TileBias<Gemm> bias;
    if (biased) bias.load(args, column);
    if (Gemm::kPingPong) {
      named_barrier_sync(kTurnBarrier + consumer, Gemm::kConsumers * 128);
    } else if (biased) {
      named_barrier_sync(kTileBarrier + group, TileBias<Gemm>::kThreads);
    }
    if (biased) bias.store(shared.bias(group));  // all its threads have passed a barrier since they read the last ones
    multiply<Gemm>(shared, place, at, accumulator, k_blocks, first_row, [&] {
      if (Gemm::kPingPong && index + clusters < tiles.count())
        named_barrier_arrive(kTurnBarrier + 1 - consumer, Gemm::kConsumers * 128);
    });
    if (Gemm::kPingPong) at.skip(k_blocks);
    if constexpr (Gemm::kSplitK > 1) reduce_across_cluster<Gemm>(shared, place, accumulator[0]);
    const int row = place.row(tile.x) + first_row + warp % 4 * Gemm::kBoxRows;
    if (biased) named_barrier_sync(kTileBarrier + group, TileBias<Gemm>::kThreads);
    visit_activation(args.epilogue.activation, [&]<Activation A>() {
      store_tile<Gemm, A>(args, accumulator, shared.bias(group), shared.store(warp), buffer, row, column);
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
  const ClusterPlace<Gemm> place(Gemm::kCluster == 1 ? 0 : cluster_rank());
  const int warp = warp_uniform(threadIdx.x / 32);

  if (threadIdx.x == 0) {
    prefetch_tensor_map(&args.a);
    prefetch_tensor_map(&args.weight);
    if (Gemm::kGated) prefetch_tensor_map(&args.up_weight);
    prefetch_tensor_map(&args.out);
    for (int stage = 0; stage < Gemm::kStages; ++stage) {
      mbarrier_init(shared.full(stage), 1);
      mbarrier_init(shared.empty(stage), Gemm::kConsumersOfTile * 4 * Gemm::kMulticast);  // each warp, in each CTA
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
    if (threadIdx.x == Gemm::kConsumers * 128) produce<Gemm>(args, shared, place);
    __syncwarp();
    if constexpr (Gemm::kSplitK > 1) {  // the consumers' two in reduce_across_cluster
      cluster_sync();
      cluster_sync();
    }
  } else {
    grow_registers<232>();
    consume<Gemm>(args, shared, place);
  }
  if constexpr (Gemm::kMulticast > 1) cluster_sync();  // no CTA leaves while its pair may still signal its barriers
#endif
}

}  // namespace fused_mlp::sm90
