// Decoding of e4m3 and int8 for wgmma, to exact values. The sums of a block of k are multiplied by its scale in
// float32.
#pragma once

#include "../decode/bytes.cuh"
#include "layout.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

namespace fused_mlp {

template <typename Gemm>
class BytesDecoder {
 public:
  const CodedRows<Gemm> rows;

  static __device__ __forceinline__ float fill_table(const CodedTiledArgs& args, const CodedTiledShared<Gemm>&) {
    return args.of_weight.factor;
  }

  __device__ __forceinline__ BytesDecoder(const CodedTiledArgs& args, const CodedTiledShared<Gemm>&, int column,
                                          float factor)
      : rows(args, column), shift_(args.of_weight.scale_shift), factor_(factor) {
    const int quarter = threadIdx.x % 4, row = rows.local[0];
    // The TMA's 128-byte swizzle moves 16-byte chunks by the row's index modulo eight, which is the same for both rows.
    place_ = row * Gemm::kRowBytes + row % 8 * 16 + quarter / 2 * 4;
    select_ = quarter % 2 == 0 ? 0x5140 : 0x7362;
  }

  // Multiplies the blocks as they arrive.
  __device__ __forceinline__ void multiply(const CodedTiledShared<Gemm>& shared, int begin, int end,
                                           float (&sums)[Gemm::kTokens / 2]) const {
    constexpr int kParts = Gemm::kBlockK / 16 / kSteps;
    Part even, odd;
    float of_block[Gemm::kTokens / 2] = {};
    sm90::RingPosition at(Gemm::kStages);
    float2 scales = scales_of(begin);
    sm90::mbarrier_wait(shared.full(at.stage), at.parity);
    decode(even, shared.weight(at.stage), 0);
#pragma unroll 1
    for (int block = begin; block < end; ++block) {
      const float2 scales_behind = scales_of(min(block + 1, end - 1));
      const int stage = at.stage;
      const uint64_t tokens = sm90::wgmma_descriptor(shared.tokens(stage));
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        multiply_part(of_block, part % 2 == 0 ? even : odd, tokens, part);
        if (part + 1 < kParts) {
          decode(part % 2 == 0 ? odd : even, shared.weight(stage), part + 1);
        } else {
          at.advance();
          if (block + 1 < end) {
            sm90::mbarrier_wait(shared.full(at.stage), at.parity);
            decode(even, shared.weight(at.stage), 0);
          }
        }
      }
      sm90::wgmma_wait<0>();
      sm90::fence_accumulator(of_block);
      if (threadIdx.x % 32 == 0) sm90::mbarrier_arrive(shared.empty(stage));
#pragma unroll
      for (int i = 0; i < Gemm::kTokens / 2; ++i) {
        sums[i] = fmaf(of_block[i], i / 2 % 2 == 0 ? scales.x : scales.y, sums[i]);
        of_block[i] = 0.0f;
      }
      scales = scales_behind;
    }
  }

 private:
  static constexpr int kSteps = 2;  // steps of 16 elements of k that are decoded at a time
  static constexpr int kHalfBytes = (Gemm::kGated ? Gemm::kColumns : 8) * Gemm::kRowBytes;  // distance of the two rows
  using Part = uint32_t[kSteps][4];

  __device__ __forceinline__ float2 scales_of(int block) const {
    const float2 scales = rows.scales_of(block * (Gemm::kBlockK / kCodedBlock), shift_);
    return make_float2(scales.x * factor_, scales.y * factor_);
  }

  // A lane has bytes 2 q and 2 q + 1 of each eight.
  __device__ __forceinline__ void decode(Part& decoded, uint32_t weight, int part) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint32_t place = (weight + place_) ^ (part * kSteps + step) * 16;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t at = place + half * kHalfBytes;
        const uint32_t low = sm80::load_shared(at), high = sm80::load_shared(at + 8);
        ByteValues<Gemm::kCoding, typename Gemm::Element>::decode(decoded[step][half], decoded[step][half + 2],
                                                                  __byte_perm(low, high, select_));
      }
    }
  }

  // Starts its products, and waits for those before them.
  static __device__ __forceinline__ void multiply_part(float (&sums)[Gemm::kTokens / 2], const Part& decoded,
                                                       uint64_t tokens, int part) {
    using Mma = sm90::WgmmaOfRegisters<typename Gemm::Element, Gemm::kTokens>;
    sm90::fence_accumulator(sums);
    sm90::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int at = part * kSteps + step;
      const uint32_t place = at / 4 * Gemm::kTokens * kCodedBlock * 2 + at % 4 * sm90::kWgmmaStepBytes;
      Mma::multiply(sums, decoded[step], tokens + (place >> 4));
    }
    sm90::wgmma_commit();
    sm90::fence_accumulator(sums);
    sm90::wgmma_wait<1>();
  }

  const int shift_;
  const float factor_;
  uint32_t place_, select_;
};

}  // namespace fused_mlp

#endif
