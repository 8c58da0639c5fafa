// Decoding of 4-bit codes for wgmma: code times scale in float32, rounded once, as if the weight had been decoded
// before.
#pragma once

#include "../decode/integers.cuh"
#include "layout.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

namespace fused_mlp {

// A thread's part of a block of k of the weights, as wgmma takes them: four steps of 16.
using DecodedBlock = uint32_t[4][4];

// The state with which a consumer's thread decodes its rows.
template <typename Gemm>
class FourBitsDecoder {
 public:
  const CodedRows<Gemm> rows;

  static __device__ __forceinline__ void fill_table(const CodedTiledArgs& args, const CodedTiledShared<Gemm>& shared) {
    const float* const code = args.of_weight.code;
    for (int i = threadIdx.x; i < 256 * 16; i += Gemm::kThreads) {
      const int high = i / 16 / 16, low = i / 16 % 16;
      shared.table()[i] = code == nullptr ? make_float2(low, high) : make_float2(__ldg(code + high), __ldg(code + low));
    }
  }

  __device__ __forceinline__ FourBitsDecoder(const CodedTiledArgs& args, const CodedTiledShared<Gemm>& shared,
                                             int column)
      : rows(args, column),
        has_zeros_(args.of_weight.code == nullptr),
        shift_(args.of_weight.scale_shift),
        table_(reinterpret_cast<const uint8_t*>(shared.table())),
        copy_(threadIdx.x % 16 * 8),
        turn_(threadIdx.x % 4 * 8 + 25) {}

  // Multiplies the blocks as they arrive.
  __device__ __forceinline__ void multiply(const CodedTiledShared<Gemm>& shared, int begin, int end,
                                           float (&sums)[Gemm::kTokens / 2]) const {
    using Mma = sm90::WgmmaOfRegisters<typename Gemm::Element, Gemm::kTokens>;
    DecodedBlock even, odd;
    sm90::RingPosition at(Gemm::kStages), next(Gemm::kStages);
    int previous = -1;
    sm90::mbarrier_wait(shared.full(at.stage), at.parity);
    decode(even, shared.weight(at.stage), rows.scales_of(begin, shift_));
    float2 scales = rows.scales_of(min(begin + 1, end - 1), shift_);

    const auto step = [&](DecodedBlock& block_codes, DecodedBlock& next_codes, int block) {
      const float2 scales_behind = rows.scales_of(min(block + 2, end - 1), shift_);
      sm90::fence_accumulator(sums);
      sm90::wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        Mma::multiply(sums, block_codes[i],
                      sm90::wgmma_descriptor(shared.tokens(at.stage) + i * sm90::kWgmmaStepBytes));
      }
      sm90::wgmma_commit();
      sm90::fence_accumulator(sums);
      sm90::wgmma_wait<1>();
      if (previous >= 0 && threadIdx.x % 32 == 0) sm90::mbarrier_arrive(shared.empty(previous));
      previous = at.stage;
      at.advance();
      if (block + 1 < end) {
        sm90::mbarrier_wait(shared.full(at.stage), at.parity);
        decode(next_codes, shared.weight(at.stage), scales);
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

 private:
  __device__ __forceinline__ void decode(DecodedBlock& decoded, uint32_t weight, float2 scales) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = rows.local[half];
      const uint32_t first = weight + row * Gemm::kRowBytes + (row / 4 % 2) * 16;  // the TMA's swizzle of 32 bytes
      const uint4 low = sm80::load_shared_uint4(first), high = sm80::load_shared_uint4(first ^ 16);
      const uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
      float scale = half == 0 ? scales.x : scales.y, zero = 0.0f;
      if (has_zeros_) {
        zero = static_cast<float>(take_zero(scale));
        zero *= -scale;
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) decoded[i / 2][i % 2 * 2 + half] = pair(words[i], scale, zero);
    }
  }

  // The two elements of the lane's byte of a word.
  __device__ __forceinline__ uint32_t pair(uint32_t word, float scale, float zero) const {
    const uint32_t entry = __funnelshift_r(word, word, turn_) & 255 * Gemm::kEntryBytes;
    const float2 code = *reinterpret_cast<const float2*>(table_ + (entry | copy_));
    return round_pair<typename Gemm::Element>(fmaf(code.x, scale, zero), fmaf(code.y, scale, zero));
  }

  const bool has_zeros_;  // int4
  const int shift_;
  const uint8_t* const table_;
  const uint32_t copy_, turn_;
};

}  // namespace fused_mlp

#endif
