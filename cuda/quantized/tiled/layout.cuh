// The tiles, the ring and the operands of the tiled GEMM with quantised weights.
#pragma once

#include "../../gemm/epilogue.cuh"
#include "../../overlap.cuh"
#include "../../sm80/ptx.cuh"
#include "../../sm90/ptx.cuh"
#include "../../sm90/ring.cuh"
#include "../../sm90/wgmma.cuh"
#include "../problem.h"

namespace fused_mlp {

struct CodedTiledArgs {
  CUtensorMap a, weight, up_weight;
  CodedWeight of_weight, of_up_weight;
  Matrix out;
  EpilogueArgs epilogue;
  int m, n, k;
  int tiles_m;
  int split;
  int loaded_tokens;  // of a tile; its other rows hold arbitrary values
};

template <Coding kCoding_, typename Element_, bool kGated_, int kTokens_, int kGroups_ = 2>
struct CodedTiled {
  using Element = Element_;
  static constexpr Coding kCoding = kCoding_;
  static constexpr bool kInBytes = in_bytes(kCoding);
  static constexpr bool kGated = kGated_;
  static constexpr Product kProduct = kGated ? Product::kGated : Product::kPlain;
  static constexpr int kTokens = kTokens_;
  static constexpr int kGroups = kGroups_, kGroupRows = 64, kRows = kGroups * kGroupRows;
  static constexpr int kColumns = kGated ? kRows / 2 : kRows;
  static constexpr int kConsumers = kGroups * 128, kThreads = kConsumers + 128;
  static constexpr int kCtas = kTokens > 64 || kGroups > 2 ? 1 : 2;  // per multiprocessor
  static constexpr int kConsumerRegisters = kCtas == 2 ? 104 : kGroups > 2 ? 112 : 240, kProducerRegisters = 24;
  static constexpr int kBlockK = tiled_block_k(kCoding);
  static constexpr int kRowBytes = kBlockK / kCodedBlock * block_bytes(kCoding), kBoxRows = kRows / 2;

  static constexpr int kTableBytes = kInBytes ? 0 : 256 * 32 * 4;  // the pairs for all bytes, per lane
  static constexpr int kTokenBytes = kTokens * kBlockK * 2, kWeightBytes = kRows * kRowBytes;
  static constexpr int kStageBytes = kTokenBytes + kWeightBytes;
  static constexpr int kAlignment = 1024, kSharedLimit = 228 * 1024 / kCtas - 1024;
  static constexpr int kStages = (kSharedLimit - kAlignment - kTableBytes) / (kStageBytes + 16);
  static constexpr int kSharedBytes = kAlignment + kTableBytes + kStages * (kStageBytes + 16);
  static constexpr int kSumStride = kRows + 4;  // no bank conflicts when lanes write sums
  static_assert(kTokens * kSumStride * 4 <= kStages * kStageBytes, "the sums are laid down where the ring was");
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <typename Gemm>
struct CodedTiledShared {
  uint8_t* const begin;
  const uint32_t ring;
  __device__ __forceinline__ explicit CodedTiledShared(uint8_t* raw)
      : begin(raw + (-sm90::shared_address(raw) & (Gemm::kAlignment - 1))), ring(sm90::shared_address(begin)) {}
  __device__ __forceinline__ uint32_t tokens(int stage) const { return ring + stage * Gemm::kStageBytes; }
  __device__ __forceinline__ uint32_t weight(int stage) const { return tokens(stage) + Gemm::kTokenBytes; }
  __device__ __forceinline__ uint8_t* table() const { return begin + Gemm::kStages * Gemm::kStageBytes; }
  __device__ __forceinline__ uint32_t full(int stage) const {
    return ring + Gemm::kStages * Gemm::kStageBytes + Gemm::kTableBytes + stage * 8;
  }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(Gemm::kStages + stage); }
  __device__ __forceinline__ uint32_t sum(int token, int row) const {
    return ring + (token * Gemm::kSumStride + row) * 4;
  }
};

// The rows of a tile that belong to a consumer thread: one, and the one 8 below it in a wgmma.
template <typename Gemm>
struct CodedRows {
  int local[2];
  const float* scales[2];

  __device__ __forceinline__ CodedRows(const CodedTiledArgs& args, int column) {
    const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, row = threadIdx.x % 32 / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // The up row of a gate row is 8 rows below it in a wgmma.
      const int of_columns = Gemm::kGated ? (group * 4 + warp) * 8 + row : (group * 4 + warp) * 16 + half * 8 + row;
      const bool up = Gemm::kGated && half == 1;
      const CodedWeight& weight = up ? args.of_up_weight : args.of_weight;
      local[half] = of_columns + (up ? Gemm::kColumns : 0);
      scales[half] = weight.scales + min(column + of_columns, args.n - 1) / weight.scale_rows * weight.scale_stride;
    }
  }

  // The scales of a block of kCodedBlock elements of k; 1 << shift blocks share one.
  __device__ __forceinline__ float2 scales_of(int block, int shift) const {
    return make_float2(__ldg(scales[0] + (block >> shift)), __ldg(scales[1] + (block >> shift)));
  }
};

#endif

}  // namespace fused_mlp
