// The kernel of MaskedSum.
#pragma once

#include "../../gemm/dropped.h"
#include "../../sm80/ptx.cuh"
#include "../../vector.cuh"

namespace fused_mlp::sm90 {

constexpr int kMaskedThreads = 256;
constexpr int kMaskedTile = 16;     // rows per warp at a time
constexpr int kMaskedColumns = 32;  // per warp: a lane has 8 adjacent ones, two in each of four instructions
constexpr int kMaskedRanks = 16;    // per instruction: a lane has 4 adjacent ones

// Loads a lane's part of 16 rows of a weight, transposed: the [columns, ranks] operand of four instructions.
template <typename Element>
__device__ __forceinline__ void load_columns(const MaskedTerm& term, int first_rank, int column, uint32_t (&b)[4][2]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int rank = first_rank + lane / 8 * 4 + half * 2 + lane / 4 % 2;
    uint4 eight = make_uint4(0, 0, 0, 0);
    if (rank < term.ranks) {
      eight = *reinterpret_cast<const uint4*>(static_cast<const Element*>(term.weight.data) +
                                              rank * term.weight.row_stride + column);
    }
    b[0][half] = sm80::transposed(eight.x);
    b[1][half] = sm80::transposed(eight.y);
    b[2][half] = sm80::transposed(eight.z);
    b[3][half] = sm80::transposed(eight.w);
  }
}

// A lane's operands of a term in two rows, 8 apart, prefetched one tile ahead because their latency limits the kernel.
template <typename Element, int kSteps>
struct MaskedRows {
  uint2 ranks[kSteps][2];
  uint32_t bits[2];

  // Loads groups of four ranks; elements after the last rank are undefined.
  __device__ __forceinline__ void load(const MaskedTerm& term, int first, int end, int word) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first + lane / 4 + half * 8;
      const bool is_there = row < end;
      const Element* const of_row = static_cast<const Element*>(term.rows.data) + row * term.rows.row_stride;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int rank = step * kMaskedRanks + lane % 4 * 4;
        ranks[step][half] = make_uint2(0, 0);
        if (is_there && rank < term.ranks) {
          ranks[step][half] = *reinterpret_cast<const uint2*>(of_row + rank);
        }
      }
      bits[half] = is_there ? term.kept.words[row * term.kept.words_of_row + word] >> lane % 4 * 8 : 0;
    }
  }

  // Clears the elements after the last rank.
  __device__ __forceinline__ void clear_past(int last_rank) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int count = last_rank - static_cast<int>(threadIdx.x) % 4 * 4 - step * kMaskedRanks;
#pragma unroll
      for (uint2& four : ranks[step]) {
        if (count < 4) four.y = count == 3 ? four.y & 0xffffu : 0;
        if (count < 2) four.x = count == 1 ? four.x & 0xffffu : 0;
      }
    }
  }
};

template <typename Element, int kTerms, int kSteps>
__global__ void __launch_bounds__(kMaskedThreads)
    masked_sum_kernel(const __grid_constant__ MaskedSum args, int rows_of_cta) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int word = blockIdx.x * (kMaskedThreads / 32) + warp, column = word * kMaskedColumns + lane % 4 * 8;
  if (column >= args.cols) return;
  uint32_t b[kTerms][kSteps][4][2];
#pragma unroll
  for (int at = 0; at < kTerms; ++at) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      load_columns<Element>(args.terms[at], step * kMaskedRanks, column, b[at][step]);
    }
  }
  const int begin = blockIdx.y * rows_of_cta, end = min(begin + rows_of_cta, static_cast<int>(args.rows));
  Element* out = static_cast<Element*>(args.out.data) + (begin + lane / 4) * args.out.row_stride + column;
  MaskedRows<Element, kSteps> next[kTerms];
#pragma unroll
  for (int at = 0; at < kTerms; ++at) next[at].load(args.terms[at], begin, end, word);
#pragma unroll 1
  for (int first = begin; first < end; first += kMaskedTile, out += kMaskedTile * args.out.row_stride) {
    float values[2][8] = {};
#pragma unroll
    for (int at = 0; at < kTerms; ++at) {
      MaskedRows<Element, kSteps> rows = next[at];
      next[at].load(args.terms[at], first + kMaskedTile, end, word);
      if (args.terms[at].ranks % 4 != 0) rows.clear_past(static_cast<int>(args.terms[at].ranks));
      float sums[4][4] = {};
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const uint2 low = rows.ranks[step][0], high = rows.ranks[step][1];
#pragma unroll
        for (int tile = 0; tile < 4; ++tile) {
          sm80::Mma<Element>::multiply(sums[tile], {low.x, high.x, low.y, high.y}, b[at][step][tile]);
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float scaled = args.terms[at].scale * sums[i / 2][half * 2 + i % 2];
          if (rows.bits[half] & 1u << i) values[half][i] += scaled;
        }
      }
    }
    if (first + lane / 4 < end) store(out, values[0]);
    if (first + lane / 4 + 8 < end) store(out + 8 * args.out.row_stride, values[1]);
  }
}

}  // namespace fused_mlp::sm90
