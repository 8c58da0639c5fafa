// Decoding of 4-bit codes by a table of pairs in shared memory: one read for two weights.
#pragma once

#include "../../gemm/epilogue.cuh"
#include "../problem.h"

namespace fused_mlp {

// The pairs of all bytes, once for each lane of a warp, so that no two lanes meet a bank. The table holds the code
// times a factor that is chosen among kFactors so that rounding to Element loses least; sums are divided by it again.
template <typename Element>
struct PairTable {
  static constexpr int kEntries = 256, kCopies = 32;
  static constexpr int kEntryBytes = kTableEntryBytes;
  static constexpr int kBytes = kEntries * kEntryBytes;
  static constexpr int kFactors = 256;

  static __device__ __forceinline__ float factor(uint32_t index) { return 1.0f + index * (1.0f / kFactors); }

  // The square error of a code that is rounded with a factor.
  static __device__ __forceinline__ float loss(const float* code, float factor) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float scaled = __ldg(code + i) * factor;
      const float error = to_float(from_float<Element>(scaled)) - scaled;
      sum += error * error;
    }
    return sum / (factor * factor);
  }

  // Fills the table by all threads of a CTA, whole warps. Returns what sums are to be multiplied by. The table can be
  // read after the next barrier.
  static __device__ __forceinline__ float fill(uint8_t* table, const CodedWeight& weight) {
    const float* const code = weight.code;
    __shared__ uint64_t best_of_warps[32];
    const int threads = blockDim.x, thread = threadIdx.x;
    uint64_t best = ~uint64_t{0};
    for (int i = thread; i < kFactors; i += threads) {
      best = min(best, static_cast<uint64_t>(__float_as_uint(loss(code, factor(i)))) << 32 | i);
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) best = min(best, __shfl_xor_sync(~0u, best, distance));
    if (thread % 32 == 0) best_of_warps[thread / 32] = best;
    __syncthreads();
    for (int warp = 0; warp < threads / 32; ++warp) best = min(best, best_of_warps[warp]);
    const float chosen = factor(static_cast<uint32_t>(best));
    constexpr int kPieces = kCopies / 4;
    for (int i = thread; i < kEntries * kPieces; i += threads) {
      const int entry = i / kPieces, piece = i % kPieces;
      const uint32_t pair = round_pair<Element>(__ldg(code + entry / 16) * chosen, __ldg(code + entry % 16) * chosen);
      *reinterpret_cast<uint4*>(table + entry * kEntryBytes + piece * 16) = make_uint4(pair, pair, pair, pair);
    }
    return 1.0f / chosen;
  }

  // The elements of 16 codes, in pairs; `of_lane` is the place of the lane's copy in an entry.
  static __device__ __forceinline__ void decode_16(uint32_t (&pairs)[8], const uint8_t* table, uint32_t of_lane,
                                                   const uint32_t (&words)[2]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      // The code is the second byte of the place.
      const uint32_t place = __byte_perm(words[i / 4], of_lane, 0x5504 + i % 4 * 16);
      pairs[i] = *reinterpret_cast<const uint32_t*>(table + place);
    }
  }
};

}  // namespace fused_mlp
