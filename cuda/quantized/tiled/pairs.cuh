// Decoding of 4-bit codes for wgmma by a table of pairs, unscaled: only codes are rounded. The sums of a block of k are
// multiplied by its scale in float32. For tiles of few rows of a, whose sums leave registers for those of a block.
#pragma once

#include "../decode/integers.cuh"
#include "../decode/pair_table.cuh"
#include "layout.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

namespace fused_mlp {

template <typename Gemm>
class PairsDecoder {
 public:
  const CodedRows<Gemm> rows;

  // Returns what sums are to be multiplied by.
  static __device__ __forceinline__ float fill_table(const CodedTiledArgs& args, const CodedTiledShared<Gemm>& shared) {
    auto* const table = reinterpret_cast<uint8_t*>(shared.table());
    if (threadIdx.x >= Table::kEntries) return 1.0f;
    if (args.of_weight.code != nullptr) {
      return Table::template fill<Table::kEntries>(table, reinterpret_cast<float*>(shared.begin), args.of_weight);
    }
    Table::put(table, threadIdx.x, round_pair<Element>(threadIdx.x % 16, threadIdx.x / 16));
    return 1.0f;
  }

  __device__ __forceinline__ PairsDecoder(const CodedTiledArgs& args, const CodedTiledShared<Gemm>& shared, int column,
                                          float unscale)
      : rows(args, column),
        has_zeros_(args.of_weight.code == nullptr),
        shift_(args.of_weight.scale_shift),
        unscale_(unscale),
        table_(reinterpret_cast<const uint8_t*>(shared.table())),
        copy_(threadIdx.x % 32 * 4),
        turn_(threadIdx.x % 4 * 8 + 25) {}

  // Multiplies the blocks as they arrive: half a block is decoded while the other one is multiplied.
  __device__ __forceinline__ void multiply(const CodedTiledShared<Gemm>& shared, int begin, int end,
                                           float (&sums)[Gemm::kTokens / 2]) const {
    Part first, second;
    float of_block[Gemm::kTokens / 2] = {};
    sm90::RingPosition at(Gemm::kStages);
    Scales scales(*this, begin);
    sm90::mbarrier_wait(shared.full(at.stage), at.parity);
    decode(first, shared.weight(at.stage), 0, scales);
#pragma unroll 1
    for (int block = begin; block < end; ++block) {
      const Scales behind(*this, min(block + 1, end - 1));
      const int stage = at.stage;
      const uint64_t tokens = sm90::wgmma_descriptor(shared.tokens(stage));
      multiply_part(of_block, first, tokens, 0);
      decode(second, shared.weight(stage), 1, scales);
      multiply_part(of_block, second, tokens, 1);
      at.advance();
      if (block + 1 < end) {
        sm90::mbarrier_wait(shared.full(at.stage), at.parity);
        decode(first, shared.weight(at.stage), 0, behind);
      }
      sm90::wgmma_wait<0>();
      sm90::fence_accumulator(of_block);
      if (threadIdx.x % 32 == 0) sm90::mbarrier_arrive(shared.empty(stage));
#pragma unroll
      for (int i = 0; i < Gemm::kTokens / 2; ++i) {
        sums[i] = fmaf(of_block[i], scales.of[i / 2 % 2], sums[i]);
        of_block[i] = 0.0f;
      }
      scales = behind;
    }
  }

 private:
  using Element = typename Gemm::Element;
  using Table = PairTable<Element, 128>;
  static_assert(Gemm::kTableBytes == Table::kBytes);
  static constexpr int kSteps = 2;  // of 16 elements of k, that are decoded at a time
  using Part = uint32_t[kSteps][4];

  // Those of both rows of a block, and where the weights are int4, their zero points.
  struct Scales {
    float of[2];
    uint32_t zeros[2];
    __device__ __forceinline__ Scales(const PairsDecoder& decoder, int block) {
      const float2 both = decoder.rows.scales_of(block, decoder.shift_);
      of[0] = both.x;
      of[1] = both.y;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float zero = decoder.has_zeros_ ? static_cast<float>(take_zero(of[half])) : 0.0f;
        zeros[half] = round_pair<Element>(zero, zero);
        of[half] *= decoder.unscale_;
      }
    }
  };

  __device__ __forceinline__ void decode(Part& decoded, uint32_t weight, int part, const Scales& scales) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = rows.local[half];
      const uint32_t place = weight + row * Gemm::kRowBytes + (row / 4 % 2 ^ part) * 16;  // the TMA's swizzle
      const uint4 four = sm80::load_shared_uint4(place);
      const uint32_t words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // The lane's byte of a word, times the bytes of an entry.
        const uint32_t entry = __funnelshift_r(words[i], words[i], turn_) & 255 * Table::kStride;
        uint32_t pair = *reinterpret_cast<const uint32_t*>(table_ + (entry | copy_));
        if (has_zeros_) {
          using Values = Integers<Element>;
          pair = Values::bits(__hsub2(Values::pair(pair), Values::pair(scales.zeros[half])));
        }
        decoded[i / 2][i % 2 * 2 + half] = pair;
      }
    }
  }

  // Leaves its products on their way, and waits for those before them.
  static __device__ __forceinline__ void multiply_part(float (&sums)[Gemm::kTokens / 2], const Part& decoded,
                                                       uint64_t tokens, int part) {
    using Mma = sm90::WgmmaOfRegisters<Element, Gemm::kTokens>;
    sm90::fence_accumulator(sums);
    sm90::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      Mma::multiply(sums, decoded[step], tokens + ((part * kSteps + step) * sm90::kWgmmaStepBytes >> 4));
    }
    sm90::wgmma_commit();
    sm90::fence_accumulator(sums);
    sm90::wgmma_wait<1>();
  }

  const bool has_zeros_;  // int4
  const int shift_;
  const float unscale_;
  const uint8_t* const table_;
  const uint32_t copy_, turn_;
};

}  // namespace fused_mlp

#endif
