// The layout of a tiled GEMM: how its tiles lie over the output and k over a cluster, where its stages and buffers are
// in shared memory, and which registers hold its sums.
#pragma once

#include <type_traits>

#include "../../gemm/epilogue.cuh"
#include "../../gemm/tile_order.cuh"
#include "../chip.h"
#include "../low_rank/low_rank.h"
#include "../ptx.cuh"

namespace fused_mlp::sm90 {

struct TiledGemmArgs {
  CUtensorMap a;
  CUtensorMap weight;
  CUtensorMap up_weight;
  CUtensorMap out;
  EpilogueArgs epilogue;
  int n;
  int k_blocks;     // of all operands
  int own_blocks;   // of a and the weights, without those of low_rank
  int last_row;     // at which a tile may begin
  int last_column;  // likewise
  int stage_bytes;  // that the TMA brings
  int tiles_m;
  int tiles_n;
  int step_column;    // from the first column of a tile to that of the next
  bool starts_early;  // before the kernel that writes a is done
  LowRankArgs low_rank;
};

// Operands of products of training.
struct TrainingGemmArgs : TiledGemmArgs {
  CUtensorMap second_a;
  CUtensorMap second_weight;
  CUtensorMap third_a;
  CUtensorMap third_weight;
  CUtensorMap gate;
  CUtensorMap up;
  CUtensorMap gate_gradient;
  CUtensorMap up_gradient;
  int term_blocks;    // of each product of a pair
  bool stores_value;  // true if a gradient's product stores act(gate) * up
};

__host__ __device__ constexpr int at_most(int limit, int value) { return value < limit ? value : limit; }

template <typename Element_, Product kProduct_, int kBlockM_, int kBlockN_, Schedule kSchedule_, int kSplitK_>
struct TiledGemm {
  using Element = Element_;
  static constexpr Product kProduct = kProduct_;
  static constexpr bool kGated = is_gated(kProduct);
  static constexpr bool kKept = is_kept(kProduct);
  static constexpr bool kGradient = is_gradient(kProduct);
  static constexpr bool kOfUp = kProduct == Product::kGatedGradient;  // a gradient of gate and of up
  static constexpr bool kPair = kProduct == Product::kPair;
  // Rows are grouped by weights: gate and up have limits, and there may be fewer tiles than CTAs.
  static constexpr bool kGrouped = false;
  static constexpr bool kMasked = false;  // true if the low-rank term always has a mask
  // The product is a^T weight, both [k, ...]: of grouped rows, whose groups are those of k.
  static constexpr bool kOuter = false;
  // The weights are [k, n]: a stage holds 64 rows of k of them, 64 columns of n side by side.
  static constexpr bool kTransposed = reads_weights_as_they_lie(kProduct);
  using Args = std::conditional_t<is_training(kProduct), TrainingGemmArgs, TiledGemmArgs>;
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kBlockK = sm90::kBlockK;
  static constexpr Schedule kSchedule = kSchedule_;
  static constexpr int kSplitK = kSplitK_;
  static constexpr bool kPingPong = kSchedule == Schedule::kPingPong;
  static constexpr bool kHalvesRows = kSchedule == Schedule::kSwappedHalfRows;
  static constexpr bool kSwapped = kSchedule == Schedule::kSwapped || kHalvesRows;
  static_assert(kSwapped || kBlockM == 128, "unswapped, two wgmmas of 64 rows of a make a tile");
  static_assert(!kSwapped || kBlockN % 128 == 0, "swapped, each of two warpgroups has a multiple of 64 weight rows");
  static_assert(kHalvesRows == (kSwapped && kGated && kBlockN == 128),
                "64 gate and 64 up rows do not divide among two warpgroups: they share the rows of a instead");
  static_assert(!is_training(kProduct) || kSchedule == Schedule::kPingPong, "products of training are made so alone");
  static_assert(!kTransposed || kBlockN % 64 == 0, "the swizzle's rows are 64 columns of n");
  static_assert(kSplitK == 1 || (kSwapped && !kGated), "the CTAs of a cluster finish some of its rows of a each");

  static constexpr int kParts = kGated ? 2 : 1;    // gate and up
  static constexpr int kTileN = kBlockN / kParts;  // columns of the output
  static constexpr int kBoxesB = kTransposed ? kBlockN / 64 : kParts;
  static constexpr int kBoxRowsB = kTransposed ? kBlockK : kBlockN / kBoxesB;
  static constexpr int kShareM = kBlockM / kSplitK;  // rows of a that one CTA finishes
  static_assert(kShareM % 8 == 0, "the swizzle repeats every 8 rows, at which every share must begin");
  static constexpr int kConsumers = 2;
  static constexpr int kThreads = (kConsumers + 1) * 128;
  static constexpr int kConsumersOfTile = kPingPong ? 1 : kConsumers;
  // A warpgroup issues kMmas wgmmas of 64 x kMmaN for each step of k. Their M sides begin kMmaStride rows apart.
  static constexpr int kMmas = kHalvesRows ? 2 : (kSwapped ? kBlockN : kBlockM) / 64 / kConsumersOfTile;
  static constexpr int kMmaStride = kSwapped ? kBlockN / 2 : 64;
  static constexpr int kMmaN = kHalvesRows ? kBlockM / 2 : kSwapped ? kBlockM : kBlockN;
  static constexpr int kAccumulators = kMmaN / 2;  // accumulators of a thread, for each wgmma

  // The results pass through shared memory, kStepN columns of a warp's 16 rows at a time, and the TMA stores them in
  // boxes of kBoxN columns. Every warp has its own buffers: warps that share some wait for each other, and then all
  // compete for the same units at the same time.
  static constexpr bool kCrowded = kMmas * kAccumulators > 128;  // few registers are left for the epilogue
  static constexpr int kStepN = kSwapped           ? 16
                                : kGradient        ? 32
                                : kCrowded         ? (kTileN % (kGated ? 32 : 64) == 0 ? 32 : 16)
                                : kTileN % 64 == 0 ? 64
                                                   : kTileN;
  static constexpr int kBoxN = kStepN % 64 == 0 ? 64 : kStepN % 32 == 0 ? 32 : 16;
  static constexpr int kBoxRows = 16;
  // The epilogue's code covers one chunk of the columns, and runs again for each of the others. It must fit the
  // innermost instruction cache (12 KB on an H100), or it waits for instructions longer than it computes.
  static constexpr int kChunks = kGated || kTileN / kStepN < 4 ? 1 : kTileN / kStepN % 2 == 0 ? 2 : 3;
  static constexpr int kChunkN = kTileN / kChunks;
  // Steps per chunk. Where the last one would pass the end of the chunk, it begins earlier and repeats some columns.
  static constexpr int kSteps = (kChunkN + kStepN - 1) / kStepN;
  __host__ __device__ static constexpr int step_column(int step) { return at_most(kChunkN - kStepN, step * kStepN); }
  static_assert(kChunks * kChunkN == kTileN, "the chunks make up a CTA's columns");
  static_assert(kChunkN % 8 == 0, "a chunk begins at an accumulator that starts a group of 8 columns");
  static_assert(kStepN % kBoxN == 0, "a step is a whole number of boxes");
  // Swapped, rows of a that a warpgroup stores, and those of them in a chunk.
  static constexpr int kStoredM = kMmaN / kSplitK;
  static constexpr int kChunkM = kStoredM % 80 == 0 ? 80 : kStoredM % 48 == 0 ? 48 : kStoredM;

  static constexpr int kBytesA = kBlockM * kBlockK * sizeof(Element);
  static constexpr int kBytesB = kBlockN * kBlockK * sizeof(Element);
  static constexpr int kStageBytes = kBytesA + kBytesB;
  static constexpr int kBoxBytes = kBoxRows * kBoxN * sizeof(Element);
  static constexpr int kStoreBytes = kBoxRows * kStepN * sizeof(Element);
  // The operands of a gradient come through slots, and leave through them as the gradient. One holds a step of gate,
  // and of up, for a warpgroup's 64 rows.
  static constexpr int kSlotRows = 64;
  static constexpr int kSlots = kGradient ? 3 : 0;
  static constexpr int kSlotBytes = kGradient ? kSlotRows * kStepN * sizeof(Element) * (kOfUp ? 2 : 1) : 0;
  static constexpr int kBarrierBytes = 256;
  static constexpr int kAlignment = 1024;
  static constexpr int kTileBiasBytes = kSwapped ? 0 : kParts * kTileN * 4;
  static constexpr int kSharedBudget = 227 * 1024 - kBarrierBytes - kTileBiasBytes * kConsumers / kConsumersOfTile -
                                       kAlignment - kConsumers * kSlots * kSlotBytes;
  // Stages come first; the rest is for buffers, at most as many as a tile has stores.
  static constexpr int kStoresOfTile = kSwapped ? kMmas / kParts * (kStoredM / 16) : kMmas * kChunks * kSteps;
  static constexpr int kBufferBytes = kConsumers * 4 * kStoreBytes;
  static constexpr int kLeastBuffers = kGradient ? 1 : at_most(2, kStoresOfTile);
  static constexpr int kStages = at_most(8, (kSharedBudget - kLeastBuffers * kBufferBytes) / kStageBytes);
  static constexpr int kStoreBuffers =
      at_most(kGradient ? 1 : at_most(4, kStoresOfTile), (kSharedBudget - kStages * kStageBytes) / kBufferBytes);
  static constexpr int kSharedBytes = 227 * 1024 - kSharedBudget + kStages * kStageBytes + kStoreBuffers * kBufferBytes;
  static_assert(kStageBytes % kAlignment == 0, "the swizzle repeats every 1024 bytes, at which every stage must begin");
  static_assert(kBoxRows % 8 == 0, "the swizzle repeats every 8 rows, at which every box must begin");
};

// True if the launch may spread the tiles over the columns, rather than put them side by side.
template <typename Gemm>
constexpr bool kSpreadsTiles = Gemm::kSwapped && Gemm::kSplitK == 1 && !Gemm::kGrouped && !Gemm::kOuter;

// The kernels that may start before the one that writes a is done.
template <typename Gemm>
constexpr bool kMayStartEarly = Gemm::kProduct == Product::kPlain && !Gemm::kGrouped && !Gemm::kOuter;

// With a mask a wide tile has too few registers: its code is another one than without.
template <typename Gemm>
struct Masked : Gemm {
  static constexpr bool kMasked = true;
};

// The kernels that take a mask of dropout.
template <typename Gemm>
constexpr bool kMayBeMasked = Gemm::kMasked || (Gemm::kGradient && !Gemm::kGrouped && Gemm::kBlockN <= kWidestMasked);

// The kernels that bring a tile's biases to shared memory. Of those that read weights as they lie, experts alone have
// biases.
template <typename Gemm>
constexpr bool kTakesTileBias =
    !Gemm::kSwapped && (!Gemm::kTransposed || (Gemm::kGrouped && Gemm::kPair && !Gemm::kOuter));

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// A tile of the output, by its first row and column: the first row of a, and the first row of each weight.
struct Tile {
  int row;
  int column;

  __device__ __forceinline__ int weight_row() const { return column; }
  __device__ __forceinline__ int64_t bias_index(int at_column) const { return at_column; }
};

// The tiles of an output whose rows all have the same weights, and the order in which the CTAs take them. What the main
// loop knows of a tile it has from here: rows grouped by weights take another order, with tiles that know their group.
struct TileOrder {
  static constexpr int kGroupM = 8;
  const TiledGemmArgs& args;
  int tiles_m = args.tiles_m;
  int tiles_n = args.tiles_n;

  __device__ __forceinline__ int count() const { return tiles_m * tiles_n; }

  // A tile that would pass an edge is moved inward, where the arguments say so: the TMA takes longer for rows outside
  // of the matrix. It computes some of its neighbour's results again, which is right only because both have the same
  // weights.
  template <typename Gemm>
  __device__ __forceinline__ Tile tile(int index) const {
    const int2 at = grouped_tile<kGroupM>(index, tiles_m, tiles_n);
    const int step = kSpreadsTiles<Gemm> ? args.step_column : Gemm::kTileN;
    return {min(at.x * Gemm::kBlockM, args.last_row), min(at.y * step, args.last_column)};
  }
};

__device__ __forceinline__ TileOrder tile_order(const TiledGemmArgs& args) { return {args}; }

// The addresses of what a CTA keeps in shared memory.
template <typename Gemm>
struct TiledGemmShared {
  uint32_t ring;

  __device__ __forceinline__ explicit TiledGemmShared(const void* raw)
      : ring((shared_address(raw) + Gemm::kAlignment - 1) & ~(Gemm::kAlignment - 1)) {}
  __device__ __forceinline__ uint32_t a(int stage) const { return ring + stage * Gemm::kStageBytes; }
  __device__ __forceinline__ uint32_t b(int stage) const { return a(stage) + Gemm::kBytesA; }
  __device__ __forceinline__ uint32_t slot(int consumer, int slot) const {
    return a(Gemm::kStages) + (consumer * Gemm::kSlots + slot) * Gemm::kSlotBytes;
  }
  __device__ __forceinline__ uint32_t store(int warp) const {
    return slot(Gemm::kConsumers, 0) + warp * Gemm::kStoreBuffers * Gemm::kStoreBytes;
  }
  __device__ __forceinline__ uint32_t bias(int group) const {
    return store(Gemm::kConsumers * 4) + group * Gemm::kTileBiasBytes;
  }
  __device__ __forceinline__ uint32_t full(int stage) const {
    return bias(Gemm::kConsumers / Gemm::kConsumersOfTile) + stage * 8;
  }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(Gemm::kStages + stage); }
  __device__ __forceinline__ uint32_t slot_full(int consumer, int slot) const {
    return full(2 * Gemm::kStages + consumer * Gemm::kSlots + slot);
  }
  __device__ __forceinline__ uint32_t slot_empty(int consumer, int slot) const {
    return slot_full(Gemm::kConsumers + consumer, slot);
  }
};

// The k blocks, [x, y), that the CTA with this rank in its cluster multiplies.
template <typename Gemm>
__device__ __forceinline__ int2 k_range(int rank, int k_blocks) {
  return {rank * k_blocks / Gemm::kSplitK, (rank + 1) * k_blocks / Gemm::kSplitK};
}

template <typename Gemm>
using Accumulator = float[Gemm::kMmas][Gemm::kAccumulators];

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace fused_mlp::sm90
