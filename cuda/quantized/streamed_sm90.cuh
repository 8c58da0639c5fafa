// The streamed GEMM of 4-bit weights for Hopper. One warp fills a ring of stages by TMA, and goes on while the others
// add up and store a tile; a stage is free as soon as the warps that multiply have read it, without a barrier of all.
#pragma once

#include "../sm90/ptx.cuh"
#include "../sm90/ring.cuh"
#include "streamed_gemm.cuh"

namespace fused_mlp {

struct CodedStreamArgs {
  CUtensorMap a, weight, up_weight, scales, up_scales;
  CodedGemmArgs gemm;
  int loaded_tokens;  // of a tile; the rest of its places hold anything
};

// A box of the TMA is 128 bytes wide, in its swizzle: four blocks of codes, or one of a.
template <typename Element_, bool kGated_, CodedKernel kKernel_>
struct CodedStream : CodedGemm<Element_, kGated_, kKernel_> {
  using Base = CodedGemm<Element_, kGated_, kKernel_>;
  static constexpr int kBoxBytes = 128, kBoxBlocks = kBoxBytes / Base::kUnitBytes;
  static constexpr int kBoxes = Base::kBlocks / kBoxBlocks;
  static constexpr int kBoxRows = kGated_ ? Base::kRows / 2 : Base::kRows;  // of one weight
  static constexpr int kScaleBytes = Base::kBlocks * 4;                     // of a row
  static constexpr int kTokenBoxBytes = Base::kTokens * kBoxBytes;
  static constexpr int kTokensOffset = Base::kRows * Base::kRowBytes;
  static constexpr int kScalesOffset = kTokensOffset + Base::kBlocks * kTokenBoxBytes;
  static constexpr int kStageBytes = (kScalesOffset + Base::kRows * kScaleBytes + 1023) / 1024 * 1024;
  static constexpr int kAlignment = 1024;
  static constexpr int kSharedBytes = kAlignment + Base::kStages * (kStageBytes + 16) +
                                      PairTable<Element_>::kBytes + Base::kWarpsK * Base::kPartFloats * 4;
  static_assert(Base::kBlocks % kBoxBlocks == 0 && Base::kTokens % 8 == 0 && kBoxRows <= 256);

  // Rows that are read at a time differ in the upper bits of what the swizzle takes of them: a lane reads 8 bytes.
  static __device__ __forceinline__ int row_of(int place) { return place % 4 * 2 + place / 4; }
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <typename Gemm>
struct CodedStreamStage {
  const uint8_t* const stage;
  const CodedLane<Gemm>& lane;
  const int block;

  // The row among those of both weights, one behind the other.
  __device__ __forceinline__ int row(int i, int half) const {
    const int tile = lane.warp_m * Gemm::kTilesM + i;
    return (Gemm::kGated ? half * Gemm::kBoxRows + tile * 8 : tile * 16 + half * 8) + lane.row;
  }
  __device__ __forceinline__ uint2 codes(int i, int half) const {
    const int box = block / Gemm::kBoxBlocks, piece = block % Gemm::kBoxBlocks * 2 + lane.quarter / 2;
    const uint8_t* const place = stage + (box * Gemm::kRows + row(i, half)) * Gemm::kBoxBytes;
    return *reinterpret_cast<const uint2*>(place + (piece ^ lane.row) * 16 + lane.quarter % 2 * 8);
  }
  __device__ __forceinline__ float scale(int i, int half) const {
    const int place = row(i, half) * Gemm::kScaleBytes + block * 4;  // the TMA swizzles these within 32 bytes
    return *reinterpret_cast<const float*>(stage + Gemm::kScalesOffset + (place ^ place / 128 % 2 * 16));
  }
  __device__ __forceinline__ uint4 tokens(int n, int half) const {
    const uint8_t* const row =
        stage + Gemm::kTokensOffset + block * Gemm::kTokenBoxBytes + (n * 8 + lane.token) * Gemm::kBoxBytes;
    return *reinterpret_cast<const uint4*>(row + ((2 * lane.quarter + half) ^ lane.token) * 16);
  }
};

// What the producer brings: of the tiles of a CTA the blocks of k [begin, end).
template <typename Gemm>
class CodedStreamProducer {
 public:
  __device__ __forceinline__ CodedStreamProducer(const CodedStreamArgs& args, uint32_t ring, uint32_t barriers)
      : args_(args), ring_(ring), barriers_(barriers) {}

  __device__ __forceinline__ void wait(const sm90::RingPosition& at) const {
    sm90::mbarrier_wait(barriers_ + (Gemm::kStages + at.stage) * 8, at.parity);
    constexpr int kWeightBytes = Gemm::kRows * (Gemm::kRowBytes + Gemm::kScaleBytes);
    sm90::mbarrier_arrive_expect(full(at), kWeightBytes + args_.loaded_tokens * Gemm::kTokenBytes);
  }

  __device__ __forceinline__ void load_weights(const sm90::RingPosition& at, int column, int block) const {
    const uint32_t stage = ring_ + at.stage * Gemm::kStageBytes;
    load_weight(at, args_.weight, args_.scales, stage, 0, column, block);
    if (Gemm::kGated) load_weight(at, args_.up_weight, args_.up_scales, stage, Gemm::kBoxRows, column, block);
  }

  __device__ __forceinline__ void load_tokens(const sm90::RingPosition& at, int token, int block) const {
    const uint32_t tokens = ring_ + at.stage * Gemm::kStageBytes + Gemm::kTokensOffset;
#pragma unroll 1
    for (int i = 0; i < Gemm::kBlocks; ++i) {
      sm90::tma_load(&args_.a, full(at), tokens + i * Gemm::kTokenBoxBytes, block * Gemm::kBlockK + i * kCodedBlock,
                     token);
    }
  }

 private:
  __device__ __forceinline__ uint32_t full(const sm90::RingPosition& at) const { return barriers_ + at.stage * 8; }

  __device__ __forceinline__ void load_weight(const sm90::RingPosition& at, const CUtensorMap& weight,
                                              const CUtensorMap& scales, uint32_t stage, int first_row, int column,
                                              int block) const {
#pragma unroll
    for (int box = 0; box < Gemm::kBoxes; ++box) {
      sm90::tma_load(&weight, full(at), stage + (box * Gemm::kRows + first_row) * Gemm::kBoxBytes,
                     (block * Gemm::kBoxes + box) * (Gemm::kBoxBytes / 2), column);
    }
    sm90::tma_load(&scales, full(at), stage + Gemm::kScalesOffset + first_row * Gemm::kScaleBytes,
                   block * Gemm::kBlocks * 2, column);  // as elements of 16 bits
  }

  const CodedStreamArgs& args_;
  const uint32_t ring_, barriers_;
};

#endif

template <typename Gemm>
__global__ void __launch_bounds__(Gemm::kThreads + 32, Gemm::kKernel.ctas)
    coded_stream_kernel(const __grid_constant__ CodedStreamArgs all) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ uint8_t raw_shared[];
  const CodedGemmArgs& args = all.gemm;
  const uint32_t unaligned = sm90::shared_address(raw_shared);
  uint8_t* const ring = raw_shared + ((unaligned + Gemm::kAlignment - 1) / Gemm::kAlignment * Gemm::kAlignment - unaligned);
  uint8_t* const table = ring + Gemm::kStages * Gemm::kStageBytes;
  const CodedParts<Gemm> parts{reinterpret_cast<float*>(table + PairTable<typename Gemm::Element>::kBytes), args.split};
  const uint32_t barriers = sm90::shared_address(parts.own + Gemm::kWarpsK * Gemm::kPartFloats);
  const int clusters = gridDim.x / args.split, cluster = blockIdx.x / args.split, rank = blockIdx.x % args.split;
  const int blocks = (args.k + Gemm::kBlockK - 1) / Gemm::kBlockK;
  const int begin = rank * blocks / args.split, end = (rank + 1) * blocks / args.split;
  const auto column_of = [&](int tile) { return tile / args.tiles_m * Gemm::kColumns; };
  const auto token_of = [&](int tile) { return tile % args.tiles_m * Gemm::kTokens; };

  allow_next_kernel();
  if (threadIdx.x == Gemm::kThreads) {
    for (int stage = 0; stage < Gemm::kStages; ++stage) {
      sm90::mbarrier_init(barriers + stage * 8, 1);
      sm90::mbarrier_init(barriers + (Gemm::kStages + stage) * 8, Gemm::kThreads / 32);
    }
    sm90::fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x >= Gemm::kThreads) {
    const CodedStreamProducer<Gemm> producer(all, sm90::shared_address(ring), barriers);
    sm90::RingPosition at(Gemm::kStages, 1);  // all stages are empty
    const int ahead = min(Gemm::kStages, end - begin);
    const bool one = threadIdx.x == Gemm::kThreads;
    const auto first_round = [&](int i) {
      sm90::RingPosition place = at;
      place.stage = i;
      return place;
    };
#pragma unroll 1
    for (int tile = cluster; tile < args.tiles; tile += clusters) {
      int block = begin;
      if (tile == cluster && one) {  // only weights are read until the kernel that writes a is done
        for (; block < begin + ahead; ++block) {
          producer.wait(first_round(block - begin));
          producer.load_weights(first_round(block - begin), column_of(tile), block);
        }
        wait_for_previous_kernel();
        for (block = begin; block < begin + ahead; ++block) {
          producer.load_tokens(first_round(block - begin), token_of(tile), block);
        }
        at.skip(ahead);
      }
      if (one) {
        for (; block < end; ++block, at.advance()) {
          producer.wait(at);
          producer.load_weights(at, column_of(tile), block);
          producer.load_tokens(at, token_of(tile), block);
        }
      }
      if (args.split > 1) {
        __syncwarp();
        sm90::cluster_sync();
        sm90::cluster_sync();
      }
    }
    return;
  }
  const float unscale = PairTable<typename Gemm::Element>::template fill<Gemm::kThreads>(table, args.weight.code);
  const auto consumers_sync = [] { sm90::named_barrier_sync(1, Gemm::kThreads); };
  consumers_sync();
  const CodedLane<Gemm> lane;
  const uint8_t* const of_lane = table + threadIdx.x % 32 * 4;
  sm90::RingPosition at(Gemm::kStages);
#pragma unroll 1
  for (int tile = cluster; tile < args.tiles; tile += clusters) {
    CodedSums<Gemm> sums = {};
#pragma unroll 1
    for (int block = begin; block < end; ++block, at.advance()) {
      sm90::mbarrier_wait(barriers + at.stage * 8, at.parity);
      const uint8_t* const stage = ring + at.stage * Gemm::kStageBytes;
#pragma unroll
      for (int step = 0; step < Gemm::kSteps; ++step) {
        multiply_block<Gemm>(sums, CodedStreamStage<Gemm>{stage, lane, lane.warp_k * Gemm::kSteps + step}, of_lane);
      }
      __syncwarp();
      if (threadIdx.x % 32 == 0) sm90::mbarrier_arrive(barriers + (Gemm::kStages + at.stage) * 8);
    }
    parts.put(sums, lane);
    const auto sync = [&] { args.split > 1 ? sm90::cluster_sync() : consumers_sync(); };
    sync();
    store_tile<Gemm>(args, parts, unscale, rank, token_of(tile), column_of(tile));
    sync();
  }
#endif
}

}  // namespace fused_mlp
