// The GEMM of more rows of a with weights of 4-bit codes, for Hopper: codes are decoded into the registers that wgmma
// takes its A side from, so that decoded weights never are in memory.
//
// Weight rows are the M side, 64 for each of two warpgroups, and up to 256 rows of a (tokens) the N side. While the
// tensor cores multiply a block of k, the warpgroup decodes the next one: code times scale in float32, rounded once, as
// if the weight had been decoded before. A CTA has one tile; a cluster may share its k, and adds its CTAs' sums in the
// order of their ranks.
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
  const float *scales, *up_scales, *code;
  Matrix out;
  EpilogueArgs epilogue;
  int m, n, k;
  int tiles_m;
  int split;
  int loaded_tokens;  // of a tile; the rest of its places hold anything
};

template <typename Element_, bool kGated_, int kTokens_>
struct CodedTiled {
  using Element = Element_;
  static constexpr bool kGated = kGated_;
  static constexpr Product kProduct = kGated ? Product::kGated : Product::kPlain;
  static constexpr int kTokens = kTokens_;
  static constexpr int kGroups = 2, kGroupRows = 64, kRows = kGroups * kGroupRows;
  static constexpr int kColumns = kGated ? kRows / 2 : kRows;
  static constexpr int kConsumers = kGroups * 128, kThreads = kConsumers + 128;
  static constexpr int kCtas = kTokens > 64 ? 1 : 2;  // of a multiprocessor
  static constexpr int kConsumerRegisters = kCtas == 1 ? 240 : 104, kProducerRegisters = 24;
  static constexpr int kBlockK = kCodedBlock;
  static constexpr int kRowBytes = kBlockK / 2, kBoxRows = 64;

  static constexpr int kEntryBytes = 16 * 8;  // a pair of floats, once for each lane of half a warp
  static constexpr int kTableBytes = 256 * kEntryBytes;
  static constexpr int kTokenBytes = kTokens * kBlockK * 2, kWeightBytes = kRows * kRowBytes;
  static constexpr int kStageBytes = kTokenBytes + kWeightBytes;
  static constexpr int kAlignment = 1024, kSharedLimit = 228 * 1024 / kCtas - 1024;
  static constexpr int kStages = (kSharedLimit - kAlignment - kTableBytes) / (kStageBytes + 16);
  static constexpr int kSharedBytes = kAlignment + kTableBytes + kStages * (kStageBytes + 16);
  static constexpr int kSumStride = kRows + 4;  // no two lanes meet a bank when they write sums
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
  __device__ __forceinline__ float2* table() const {
    return reinterpret_cast<float2*>(begin + Gemm::kStages * Gemm::kStageBytes);
  }
  __device__ __forceinline__ uint32_t full(int stage) const {
    return ring + Gemm::kStages * Gemm::kStageBytes + Gemm::kTableBytes + stage * 8;
  }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(Gemm::kStages + stage); }
  __device__ __forceinline__ uint32_t sum(int token, int row) const {
    return ring + (token * Gemm::kSumStride + row) * 4;
  }
};

// A thread's part of a block of k of the weights, as wgmma takes them: four steps of 16.
using DecodedBlock = uint32_t[4][4];

// The rows of a consumer's thread, and what it needs to decode them.
template <typename Gemm>
class CodedDecoder {
 public:
  __device__ __forceinline__ CodedDecoder(const CodedTiledArgs& args, const uint8_t* table, int column)
      : table_(table), copy_(threadIdx.x % 16 * 8), turn_(threadIdx.x % 4 * 8 + 25) {
    const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, row = threadIdx.x % 32 / 4;
    const int blocks = args.k / kCodedBlock;
    if constexpr (Gemm::kGated) {  // the up row of a gate row is 8 rows below it in a wgmma
      rows_[0] = (group * 4 + warp) * 8 + row;
      rows_[1] = Gemm::kColumns + rows_[0];
      const int64_t of_weight = min(column + rows_[0], args.n - 1);
      scales_[0] = args.scales + of_weight * blocks;
      scales_[1] = args.up_scales + of_weight * blocks;
    } else {
      rows_[0] = (group * 4 + warp) * 16 + row;
      rows_[1] = rows_[0] + 8;
      for (int i = 0; i < 2; ++i) {
        scales_[i] = args.scales + static_cast<int64_t>(min(column + rows_[i], args.n - 1)) * blocks;
      }
    }
  }

  // The row of a tile that is the lane's, or the one 8 below it in a wgmma.
  __device__ __forceinline__ int row(int half) const { return rows_[half]; }

  // Asks for the scales of a block before it is there.
  __device__ __forceinline__ float2 scales(int block) const {
    return make_float2(__ldg(scales_[0] + block), __ldg(scales_[1] + block));
  }

  __device__ __forceinline__ void decode(DecodedBlock& decoded, uint32_t weight, float2 scales) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = rows_[half];
      const uint32_t first = weight + row * Gemm::kRowBytes + (row / 4 % 2) * 16;  // the TMA's swizzle of 32 bytes
      const uint4 low = sm80::load_shared_uint4(first), high = sm80::load_shared_uint4(first ^ 16);
      const uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
      const float scale = half == 0 ? scales.x : scales.y;
#pragma unroll
      for (int i = 0; i < 8; ++i) decoded[i / 2][i % 2 * 2 + half] = pair(words[i], scale);
    }
  }

 private:
  // The two elements of the lane's byte of a word.
  __device__ __forceinline__ uint32_t pair(uint32_t word, float scale) const {
    const uint32_t entry = __funnelshift_r(word, word, turn_) & 255 * Gemm::kEntryBytes;
    const float2 code = *reinterpret_cast<const float2*>(table_ + (entry | copy_));
    return round_pair<typename Gemm::Element>(code.x * scale, code.y * scale);
  }

  const uint8_t* const table_;
  const uint32_t copy_, turn_;
  int rows_[2];
  const float* scales_[2];
};

// Brings the blocks [begin, end) into the ring. Run by one thread.
template <typename Gemm>
__device__ __forceinline__ void produce(const CodedTiledArgs& args, const CodedTiledShared<Gemm>& shared, int begin,
                                        int end, int column, int token) {
  const uint32_t bytes = args.loaded_tokens * Gemm::kBlockK * 2 + Gemm::kWeightBytes;
  sm90::RingPosition at(Gemm::kStages, 1);  // all stages are empty
#pragma unroll 1
  for (int block = begin; block < end; ++block, at.advance()) {
    sm90::mbarrier_wait(shared.empty(at.stage), at.parity);
    const uint32_t full = shared.full(at.stage), weight = shared.weight(at.stage);
    sm90::mbarrier_arrive_expect(full, bytes);
    constexpr int kWords = Gemm::kRowBytes / 2, kBoxBytes = Gemm::kBoxRows * Gemm::kRowBytes;  // of 16 bits
    sm90::tma_load(&args.weight, full, weight, block * kWords, column);
    sm90::tma_load(Gemm::kGated ? &args.up_weight : &args.weight, full, weight + kBoxBytes, block * kWords,
                   Gemm::kGated ? column : column + Gemm::kBoxRows);
    sm90::tma_load(&args.a, full, shared.tokens(at.stage), block * Gemm::kBlockK, token);
  }
}

// Multiplies the blocks as they arrive.
template <typename Gemm>
__device__ __forceinline__ void consume(const CodedTiledShared<Gemm>& shared, const CodedDecoder<Gemm>& decoder,
                                        int begin, int end, float (&sums)[Gemm::kTokens / 2]) {
  using Mma = sm90::WgmmaOfRegisters<typename Gemm::Element, Gemm::kTokens>;
  DecodedBlock even, odd;
  sm90::RingPosition at(Gemm::kStages), next(Gemm::kStages);
  int previous = -1;
  sm90::mbarrier_wait(shared.full(at.stage), at.parity);
  decoder.decode(even, shared.weight(at.stage), decoder.scales(begin));
  float2 scales = decoder.scales(min(begin + 1, end - 1));

  const auto step = [&](DecodedBlock& block_codes, DecodedBlock& next_codes, int block) {
    const float2 scales_behind = decoder.scales(min(block + 2, end - 1));
    sm90::fence_accumulator(sums);
    sm90::wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Mma::multiply(sums, block_codes[i], sm90::wgmma_descriptor(shared.tokens(at.stage) + i * sm90::kWgmmaStepBytes));
    }
    sm90::wgmma_commit();
    sm90::fence_accumulator(sums);
    sm90::wgmma_wait<1>();
    if (previous >= 0 && threadIdx.x % 32 == 0) sm90::mbarrier_arrive(shared.empty(previous));
    previous = at.stage;
    at.advance();
    if (block + 1 < end) {
      sm90::mbarrier_wait(shared.full(at.stage), at.parity);
      decoder.decode(next_codes, shared.weight(at.stage), scales);
    }
    scales = scales_behind;
  };
#pragma unroll 1
  for (int block = begin; block < end; block += 2) {
    step(even, odd, block);
    if (block + 1 < end) step(odd, even, block + 1);
  }
  sm90::wgmma_wait<0>();
  sm90::fence_accumulator(sums);
}

// Adds the cluster's sums, which lie in shared memory, and stores eight adjacent results of a token at a time.
template <typename Gemm>
__device__ __forceinline__ void store_tile(const CodedTiledArgs& args, const CodedTiledShared<Gemm>& shared, int rank,
                                           int first_column, int first_token) {
  using Element = typename Gemm::Element;
  constexpr int kCount = 8, kVectors = Gemm::kColumns / kCount;
  const EpilogueArgs& epilogue = args.epilogue;
  const CodedActivation<Element> activate{epilogue.activation};
  const int tokens = min(Gemm::kTokens, args.m - first_token);
#pragma unroll 1
  for (int item = rank * Gemm::kConsumers + threadIdx.x; item < tokens * kVectors;
       item += args.split * Gemm::kConsumers) {
    const int local = item % kVectors * kCount, token = item / kVectors, column = first_column + local;
    if (column >= args.n) continue;
    float value[kCount];
    GluEpilogue<Gemm::kProduct>::apply(value, activate, [&](Operand operand, auto&& take) {
      const bool up = operand == Operand::kUp;
      float sum[kCount] = {};
      for (int source = 0; source < args.split; ++source) {
        const uint32_t place =
            sm90::map_to_rank(shared.sum(token, local + (up ? Gemm::kColumns : 0)), static_cast<uint32_t>(source));
#pragma unroll
        for (int i = 0; i < kCount; i += 4) {
          const float4 four = sm90::load_cluster_float4(place + i * 4);
          sum[i] += four.x;
          sum[i + 1] += four.y;
          sum[i + 2] += four.z;
          sum[i + 3] += four.w;
        }
      }
      const void* const bias = up ? epilogue.up_bias : epilogue.bias;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const float of_column = bias == nullptr ? 0.0f : to_float(static_cast<const Element*>(bias)[column + i]);
        take(i, sum[i] + of_column);
      }
    });
    const int64_t row = first_token + token;
    store<Element, kCount>(static_cast<Element*>(args.out.data) + row * args.out.row_stride + column, value);
  }
}

#endif

template <typename Gemm>
__global__ void __launch_bounds__(Gemm::kThreads, Gemm::kCtas)
    coded_tiled_kernel(const __grid_constant__ CodedTiledArgs args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ uint8_t raw_shared[];
  const CodedTiledShared<Gemm> shared(raw_shared);
  const int tile = blockIdx.x / args.split, rank = blockIdx.x % args.split;
  const int column = tile / args.tiles_m * Gemm::kColumns, token = tile % args.tiles_m * Gemm::kTokens;
  const int blocks = args.k / kCodedBlock;
  const int begin = rank * blocks / args.split, end = (rank + 1) * blocks / args.split;

  allow_next_kernel();
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Gemm::kStages; ++stage) {
      sm90::mbarrier_init(shared.full(stage), 1);
      sm90::mbarrier_init(shared.empty(stage), Gemm::kConsumers / 32);
    }
    sm90::fence_mbarrier_init();
  }
  for (int i = threadIdx.x; i < 256 * 16; i += Gemm::kThreads) {
    const int entry = i / 16;
    shared.table()[i] = make_float2(__ldg(args.code + entry / 16), __ldg(args.code + entry % 16));
  }
  __syncthreads();
  if (threadIdx.x >= Gemm::kConsumers) {
    sm90::shrink_registers<Gemm::kProducerRegisters>();
    if (threadIdx.x == Gemm::kConsumers) {
      wait_for_previous_kernel();
      produce<Gemm>(args, shared, begin, end, column, token);
    }
    if (args.split > 1) {
      __syncwarp();
      sm90::cluster_sync();
      sm90::cluster_sync();
    }
    return;
  }
  sm90::grow_registers<Gemm::kConsumerRegisters>();
  const CodedDecoder<Gemm> decoder(args, reinterpret_cast<const uint8_t*>(shared.table()), column);
  float sums[Gemm::kTokens / 2] = {};
  consume<Gemm>(shared, decoder, begin, end, sums);
  sm90::named_barrier_sync(1, Gemm::kConsumers);  // the sums go where the ring was: all warps must be done with it
#pragma unroll
  for (int i = 0; i < Gemm::kTokens / 2; ++i) {
    const int of_tile = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
    sm90::store_shared_float(shared.sum(of_tile, decoder.row(i / 2 % 2)), sums[i]);
  }
  const auto sync = [&] { args.split > 1 ? sm90::cluster_sync() : sm90::named_barrier_sync(1, Gemm::kConsumers); };
  sync();
  store_tile<Gemm>(args, shared, rank, column, token);
  if (args.split > 1) sync();  // no CTA exits while the others still read its sums
#endif
}

}  // namespace fused_mlp
