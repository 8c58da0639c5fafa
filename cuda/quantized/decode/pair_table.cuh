// Decoding of 4-bit codes by a table of pairs in shared memory: one read for two weights.
#pragma once

#include "../../gemm/epilogue.cuh"
#include "../problem.h"

namespace fused_mlp {

// The pairs for all bytes, one copy per lane of a warp, so that there are no bank conflicts. The table holds the code
// times a factor, chosen among kFactors for the smallest rounding error in Element; sums are divided by it again.
template <typename Element>
struct PairTable {
  static constexpr int kEntries = 256, kCopies = 32;
  static constexpr int kEntryBytes = kCopies * 4;
  static constexpr int kBytes = kEntries * kEntryBytes;
  static constexpr int kFactors = 256, kWarps = kFactors / 32;
  static constexpr uint32_t kEntryMask = (kEntries - 1) * kEntryBytes;

  static __device__ __forceinline__ float factor(uint32_t index) { return 1.0f + index * (1.0f / kFactors); }

  // The squared error of codes that are rounded with a factor.
  static __device__ __forceinline__ float loss(const float* code, float factor) {
    float sum = 0.0f;
#pragma unroll 4
    for (int i = 0; i < 16; ++i) {
      const float scaled = __ldg(code + i) * factor;
      const float error = to_float(from_float<Element>(scaled)) - scaled;
      sum += error * error;
    }
    return sum / (factor * factor);
  }

  template <int kThreads>
  static __device__ __forceinline__ float fill(uint8_t* table, const CodedWeight& weight) {
    __shared__ uint64_t best_of_warps[kWarps];
    return fill<kThreads>(table, weight, best_of_warps);
  }

  // Fills the table with the first kThreads threads of a CTA. Returns the factor for the sums. After these threads'
  // next barrier the table can be read, and the memory for kWarps numbers reused.
  template <int kThreads>
  static __device__ __forceinline__ float fill(uint8_t* table, const CodedWeight& weight, uint64_t* best_of_warps) {
    const float* const code = weight.code;
    static_assert(kThreads >= kFactors && kThreads % kEntries == 0);
    const int thread = threadIdx.x;
    if (thread < kFactors) {
      uint64_t best = static_cast<uint64_t>(__float_as_uint(loss(code, factor(thread)))) << 32 | thread;
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2) best = min(best, __shfl_xor_sync(~0u, best, distance));
      if (thread % 32 == 0) best_of_warps[thread / 32] = best;
    }
    asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
    uint64_t best = best_of_warps[0];
#pragma unroll
    for (int warp = 1; warp < kWarps; ++warp) best = min(best, best_of_warps[warp]);
    const float chosen = factor(static_cast<uint32_t>(best));
    const int entry = thread % kEntries;
    const uint32_t pair = round_pair<Element>(__ldg(code + entry / 16) * chosen, __ldg(code + entry % 16) * chosen);
    constexpr int kPieces = kEntryBytes / 16, kOfThread = kPieces * kEntries / kThreads;
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      const int piece = (thread / kEntries * kOfThread + i + thread) % kPieces;
      *reinterpret_cast<uint4*>(table + entry * kEntryBytes + piece * 16) = make_uint4(pair, pair, pair, pair);
    }
    return 1.0f / chosen;
  }

  // The elements of 16 codes, in pairs; `of_lane` is the lane's copy of the table.
  static __device__ __forceinline__ void decode_16(uint32_t (&pairs)[8], const uint8_t* of_lane, const uint8_t* codes) {
    const uint2 words = *reinterpret_cast<const uint2*>(codes);
    decode_8(pairs, of_lane, words.x);
    decode_8(pairs + 4, of_lane, words.y);
  }

 private:
  // The elements of byte i in pairs[i], the first one in the low half.
  static __device__ __forceinline__ void decode_8(uint32_t* pairs, const uint8_t* of_lane, uint32_t bytes) {
    pairs[0] = *reinterpret_cast<const uint32_t*>(of_lane + (bytes << 7 & kEntryMask));
    pairs[1] = *reinterpret_cast<const uint32_t*>(of_lane + (bytes >> 1 & kEntryMask));
    pairs[2] = *reinterpret_cast<const uint32_t*>(of_lane + (bytes >> 9 & kEntryMask));
    pairs[3] = *reinterpret_cast<const uint32_t*>(of_lane + (bytes >> 17 & kEntryMask));
  }
};

}  // namespace fused_mlp
