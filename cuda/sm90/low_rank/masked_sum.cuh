// The kernel of MaskedSum.
#pragma once

#include "../../gemm/dropped.h"
#include "../../sm80/ptx.cuh"
#include "../../vector.cuh"

namespace fused_mlp::sm90 {

constexpr int kMaskedThreads = 256;
constexpr int kMaskedTile = 16;     // rows of a warp at a time
constexpr int kMaskedColumns = 32;  // of a warp: a lane has 8 that are adjacent, two in each of four instructions
constexpr int kMaskedRanks = 16;    // of an instruction: a lane has 4 that are adjacent

// A lane's part of 16 rows of a weight, transposed: the side [columns, ranks] of four instructions.
template <typename Element>
__device__ __forceinline__ void load_columns(const MaskedTerm& term, int first_rank, int column, bool inside,
                                             uint32_t (&b)[4][2]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int rank = first_rank + lane / 8 * 4 + half * 2 + lane / 4 % 2;
    uint4 eight = make_uint4(0, 0, 0, 0);
    if (inside && rank < term.ranks) {
      eight = *reinterpret_cast<const uint4*>(static_cast<const Element*>(term.weight.data) +
                                              rank * term.weight.row_stride + column);
    }
    b[0][half] = sm80::transposed(eight.x);
    b[1][half] = sm80::transposed(eight.y);
    b[2][half] = sm80::transposed(eight.z);
    b[3][half] = sm80::transposed(eight.w);
  }
}

// Four adjacent elements of a row, zeros from `count` on.
template <typename Element>
__device__ __forceinline__ uint2 load_four(const Element* elements, int count) {
  if (count <= 0) return make_uint2(0, 0);
  uint2 four = *reinterpret_cast<const uint2*>(elements);
  if (count < 4) {
    if (count < 3) four.y = 0;
    if (count == 3) four.y &= 0xffffu;
    if (count == 1) four.x &= 0xffffu;
  }
  return four;
}

template <typename Element, int kTerms, int kSteps>
__global__ void __launch_bounds__(kMaskedThreads)
    masked_sum_kernel(const __grid_constant__ MaskedSum args, int rows_of_cta) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int word = blockIdx.x * (kMaskedThreads / 32) + warp, column = word * kMaskedColumns + lane % 4 * 8;
  const bool inside = column < args.cols;
  uint32_t b[kTerms][kSteps][4][2];
#pragma unroll
  for (int term = 0; term < kTerms; ++term) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      load_columns<Element>(args.terms[term], step * kMaskedRanks, column, inside, b[term][step]);
    }
  }
  const int begin = blockIdx.y * rows_of_cta, end = min(begin + rows_of_cta, static_cast<int>(args.rows));
  for (int first = begin; first < end; first += kMaskedTile) {
    const int rows[2] = {first + lane / 4, first + lane / 4 + 8};
    float values[2][8] = {};
#pragma unroll
    for (int at = 0; at < kTerms; ++at) {
      const MaskedTerm& term = args.terms[at];
      float sums[4][4] = {};
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int rank = step * kMaskedRanks + lane % 4 * 4;
        uint2 four[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const Element* row = static_cast<const Element*>(term.rows.data) + rows[half] * term.rows.row_stride + rank;
          four[half] = load_four(row, rows[half] < end ? static_cast<int>(term.ranks) - rank : 0);
        }
#pragma unroll
        for (int tile = 0; tile < 4; ++tile) {
          sm80::Mma<Element>::multiply(sums[tile], {four[0].x, four[1].x, four[0].y, four[1].y}, b[at][step][tile]);
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool is_there = inside && rows[half] < end;
        const uint32_t bits = is_there ? term.kept.words[rows[half] * term.kept.words_of_row + word] : 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (bits >> (lane % 4 * 8 + i) & 1) values[half][i] += term.scale * sums[i / 2][half * 2 + i % 2];
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (inside && rows[half] < end) {
        store(static_cast<Element*>(args.out.data) + rows[half] * args.out.row_stride + column, values[half]);
      }
    }
  }
}

}  // namespace fused_mlp::sm90
