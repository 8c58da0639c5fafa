// The tiles, the ring and the operands of the scaled e4m3 GEMM.
#pragma once

#include "../../gemm/epilogue.cuh"
#include "../../gemm/grouped.h"
#include "../../gemm/tile_order.cuh"
#include "../../overlap.cuh"
#include "../../sm90/ptx.cuh"
#include "../../sm90/ring.cuh"
#include "../../sm90/wgmma.cuh"
#include "../e4m3.cuh"
#include "scaled.h"

namespace fused_mlp {

struct ScaledArgs {
  CUtensorMap a, weight, up_weight, out;
  ScaledRows a_rows;
  CodedWeight of_weight, of_up_weight;
  ScaledRows rounded;
  float* parts;  // [split, m, n]: unscaled destination for sums of parts of k
  EpilogueArgs epilogue;
  int m, n, k, k_blocks;
  int units_m, tiles_n;  // a unit is the rows of the CTAs that share weights
  int pair, split;
  int loaded_rows;  // of a tile; its other rows hold arbitrary values
  ScaledExperts experts;
  bool by_rows;  // each weight row has a scale, applied to the sums at the end

  // True if rows are read from the tokens' original places, by lists that the previous kernel writes.
  template <typename Gemm>
  __device__ __forceinline__ bool gathers() const {
    return Gemm::kExperts && experts.token_of_row != nullptr;
  }
};

// For experts, whose tiles differ in time and whose rows may be gathered, the producer passes the tiles to the
// consumers.
template <typename Element_, bool kGated_, bool kExperts_ = false>
struct ScaledGemm {
  using Element = Element_;
  static constexpr bool kExperts = kExperts_;
  static constexpr bool kGated = kGated_;
  static constexpr Product kProduct = kGated ? Product::kGated : Product::kPlain;
  static constexpr int kWarpgroups = 2, kConsumers = kWarpgroups * 128, kThreads = kConsumers + 128;
  static constexpr int kTileM = kWarpgroups * 64, kHalfN = 128, kHalves = 2;
  static_assert(kTileM == kScaledTile);
  static constexpr int kColumns = kGated ? kHalfN : kHalves * kHalfN;  // of the result
  static constexpr int kBlockK = kScaledGroup, kStages = 4;
  static constexpr int kSums = kHalfN / 2;  // per thread, for 64 rows and a half's columns
  static constexpr int kConsumerRegisters = kExperts ? 224 : 240, kProducerRegisters = kExperts ? 56 : 24;

  static constexpr int kBytesA = kTileM * kBlockK, kHalfBytes = kHalfN * kBlockK;
  static constexpr int kStageBytes = kBytesA + kHalves * kHalfBytes, kScaleBytes = kTileM * 4;
  static constexpr int kBoxRows = 16, kBoxBytes = kBoxRows * 128;  // per store of a warp
  static constexpr int kTileBytes = 16;                            // for the ScaledTile that a stage belongs to
  static constexpr int kBoxes = kExperts ? 2 : 1;                  // per warp, used alternately
  static constexpr int kAlignment = 1024, kGivenAlignment = 128;
  static constexpr int kSharedBytes = kAlignment - kGivenAlignment +
                                      kStages * (kStageBytes + kScaleBytes + 16 + kTileBytes) +
                                      kConsumers / 32 * kBoxes * kBoxBytes;
  static_assert(kSharedBytes <= 227 * 1024);
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

struct ScaledTile {
  int row, column, part;  // of k
  BlockCode code;         // its expert, or 0, and the number of its rows

  __device__ __forceinline__ int2 blocks(const ScaledArgs& args) const {  // of k
    return {part * args.k_blocks / args.split, (part + 1) * args.k_blocks / args.split};
  }
};

template <typename Gemm>
struct ScaledShared {
  const uint32_t ring;
  __device__ __forceinline__ explicit ScaledShared(const void* raw)
      : ring((sm90::shared_address(raw) + Gemm::kAlignment - 1) & ~(Gemm::kAlignment - 1)) {}
  __device__ __forceinline__ uint32_t a(int stage) const { return ring + stage * Gemm::kStageBytes; }
  __device__ __forceinline__ uint32_t half(int stage, int half) const {
    return a(stage) + Gemm::kBytesA + half * Gemm::kHalfBytes;
  }
  __device__ __forceinline__ uint32_t boxes(int warp) const {
    return a(Gemm::kStages) + warp * Gemm::kBoxes * Gemm::kBoxBytes;
  }
  __device__ __forceinline__ uint32_t scales(int stage) const {
    return boxes(Gemm::kConsumers / 32) + stage * Gemm::kScaleBytes;
  }
  __device__ __forceinline__ uint32_t full(int stage) const { return scales(Gemm::kStages) + stage * 8; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(Gemm::kStages + stage); }

  __device__ __forceinline__ void put(int stage, const ScaledTile& tile) const {
    asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(place(stage)), "r"(tile.row), "r"(tile.column),
                 "r"(tile.part), "r"(tile.code.code)
                 : "memory");
  }
  __device__ __forceinline__ ScaledTile tile(int stage) const {
    ScaledTile tile;
    asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(tile.row), "=r"(tile.column), "=r"(tile.part), "=r"(tile.code.code)
                 : "r"(place(stage))
                 : "memory");
    return tile;
  }

 private:
  __device__ __forceinline__ uint32_t place(int stage) const {
    return full(2 * Gemm::kStages) + stage * Gemm::kTileBytes;
  }
};

// The sums of a thread for each half, in wgmma's layout.
template <typename Gemm>
using ScaledSums = float[Gemm::kHalves][Gemm::kSums];

#endif

}  // namespace fused_mlp
