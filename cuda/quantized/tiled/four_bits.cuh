// Decoding of 4-bit codes for wgmma: code times scale, rounded once, as if the weight had been decoded before. A pair
// of 16-bit codes is one read of shared memory, which is as busy as the tensor cores. The scale is two 16-bit numbers,
// so that the product is as exact as in float32.
#pragma once

#include "../decode/integers.cuh"
#include "../decode/pair_table.cuh"
#include "layout.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

namespace fused_mlp {

// A thread's part of a block of k of the weights, in wgmma's layout: four steps of 16.
using DecodedBlock = uint32_t[4][4];

// The state with which a consumer thread decodes its rows.
template <typename Gemm>
class FourBitsDecoder {
 public:
  using Element = typename Gemm::Element;
  using Pair = typename ElementTraits<Element>::Pair;
  using Table = PairTable<Element>;
  static_assert(Table::kBytes == Gemm::kTableBytes);
  const CodedRows<Gemm> rows;

  // Returns the factor for scales.
  static __device__ __forceinline__ float fill_table(const CodedTiledArgs& args, const CodedTiledShared<Gemm>& shared) {
    if (threadIdx.x >= Gemm::kConsumers) return 1.0f;
    if (args.of_weight.code != nullptr) {
      auto* const beside = reinterpret_cast<uint64_t*>(shared.begin);  // in the ring, which is not filled yet
      return Table::template fill<Gemm::kConsumers>(shared.table(), args.of_weight, beside);
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < Table::kEntries * Table::kCopies; i += Gemm::kConsumers) {
      const int byte = i / Table::kCopies;
      reinterpret_cast<uint32_t*>(shared.table())[i] = round_pair<Element>(byte % 16, byte / 16);
    }
    return 1.0f;
  }

  __device__ __forceinline__ FourBitsDecoder(const CodedTiledArgs& args, const CodedTiledShared<Gemm>& shared,
                                             int column, float factor)
      : rows(args, column),
        has_zeros_(args.of_weight.code == nullptr),
        shift_(args.of_weight.scale_shift),
        factor_(factor),
        place_(sm90::shared_address(shared.table()) + threadIdx.x % 32 * 4),
        select_(0x4440 + threadIdx.x % 4) {}

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
      const uint32_t first = weight + row * Gemm::kRowBytes + (row / 4 % 2) * 16;  // the TMA's 32-byte swizzle
      const uint4 low = sm80::load_shared_uint4(first), high = sm80::load_shared_uint4(first ^ 16);
      const uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
      float scale = half == 0 ? scales.x : scales.y;
      const uint32_t zero = has_zeros_ ? take_zero(scale) : 0;
      scale *= factor_;
      const float above = to_float(from_float<Element>(scale));
      const Pair large = both(above), small = both(scale - above), zeros = both(static_cast<float>(zero));
      Pair codes[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) codes[i] = codes_of(words[i]);
      // A branch would become a predicate of each of these instructions.
#pragma unroll 1
      for (bool subtracts = has_zeros_; subtracts; subtracts = false) {
#pragma unroll
        for (int i = 0; i < 8; ++i) codes[i] = __hsub2(codes[i], zeros);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const Pair values = __hfma2(codes[i], large, __hmul2(codes[i], small));
        decoded[i / 2][i % 2 * 2 + half] = *reinterpret_cast<const uint32_t*>(&values);
      }
    }
  }

  static __device__ __forceinline__ Pair both(float value) {
    const uint32_t bits = round_pair<Element>(value, value);
    return *reinterpret_cast<const Pair*>(&bits);
  }

  // The codes of the lane's byte of a word.
  __device__ __forceinline__ Pair codes_of(uint32_t word) const {
    const uint32_t bits = sm80::load_shared(place_ + __byte_perm(word, 0, select_) * Table::kEntryBytes);
    return *reinterpret_cast<const Pair*>(&bits);
  }

  const bool has_zeros_;  // int4
  const int shift_;
  const float factor_;
  const uint32_t place_, select_;  // offset of the lane's copy of the table, selector of its byte of a word
};

}  // namespace fused_mlp

#endif
