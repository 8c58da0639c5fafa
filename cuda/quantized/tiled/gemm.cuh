// The GEMM of more rows of a with quantised weights, for Hopper: codes are decoded into the registers of wgmma's A
// operand, so decoded weights are never in memory.
//
// Weight rows are the M side, 64 per warpgroup, and up to 256 rows of a (tokens) the N side. While the tensor cores
// multiply a block of k, the warpgroup decodes the next one: four_bits.cuh, bytes.cuh. A CTA has one tile. A cluster
// may share its k, and adds its CTAs' sums in the order of their ranks.
#pragma once

#include <type_traits>

#include "bytes.cuh"
#include "four_bits.cuh"

namespace fused_mlp {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Loads the blocks [begin, end) into the ring. Run by one thread.
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
    constexpr int kWords = Gemm::kRowBytes / 2, kBoxBytes = Gemm::kBoxRows * Gemm::kRowBytes;  // in 16-bit words
    sm90::tma_load(&args.weight, full, weight, block * kWords, column);
    sm90::tma_load(Gemm::kGated ? &args.up_weight : &args.weight, full, weight + kBoxBytes, block * kWords,
                   Gemm::kGated ? column : column + Gemm::kBoxRows);
#pragma unroll
    for (int k = 0; k < Gemm::kBlockK; k += kCodedBlock) {
      sm90::tma_load(&args.a, full, shared.tokens(at.stage) + k * Gemm::kTokens * 2, block * Gemm::kBlockK + k, token);
    }
  }
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
  using Decoder = std::conditional_t<Gemm::kInBytes, BytesDecoder<Gemm>, FourBitsDecoder<Gemm>>;
  extern __shared__ uint8_t raw_shared[];
  const CodedTiledShared<Gemm> shared(raw_shared);
  const int tile = blockIdx.x / args.split, rank = blockIdx.x % args.split;
  const int column = tile / args.tiles_m * Gemm::kColumns, token = tile % args.tiles_m * Gemm::kTokens;
  const int blocks = (args.k + Gemm::kBlockK - 1) / Gemm::kBlockK;
  const int begin = rank * blocks / args.split, end = (rank + 1) * blocks / args.split;

  allow_next_kernel();
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Gemm::kStages; ++stage) {
      sm90::mbarrier_init(shared.full(stage), 1);
      sm90::mbarrier_init(shared.empty(stage), Gemm::kConsumers / 32);
    }
    sm90::fence_mbarrier_init();
  }
  const float factor = Decoder::fill_table(args, shared);
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
  const Decoder decoder(args, shared, column, factor);
  float sums[Gemm::kTokens / 2] = {};
  decoder.multiply(shared, begin, end, sums);
  sm90::named_barrier_sync(1, Gemm::kConsumers);  // the sums overwrite the ring: all warps must be done with it
#pragma unroll
  for (int i = 0; i < Gemm::kTokens / 2; ++i) {
    const int of_tile = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
    sm90::store_shared_float(shared.sum(of_tile, decoder.rows.local[i / 2 % 2]), sums[i]);
  }
  const auto sync = [&] { args.split > 1 ? sm90::cluster_sync() : sm90::named_barrier_sync(1, Gemm::kConsumers); };
  sync();
  store_tile<Gemm>(args, shared, rank, column, token);
  if (args.split > 1) sync();  // no CTA exits while the others still read its sums
#endif
}

}  // namespace fused_mlp
