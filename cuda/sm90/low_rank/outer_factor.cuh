// The kernel of OuterFactor.
#pragma once

#include "../../gemm/dropped.h"
#include "../../sm80/ptx.cuh"
#include "../../vector.cuh"
#include "../ptx.cuh"

namespace fused_mlp::sm90 {

constexpr int kOuterThreads = 256, kOuterWarps = kOuterThreads / 32;
constexpr int kOuterRanks = 16;    // per instruction: a lane has two adjacent ones
constexpr int kOuterColumns = 64;  // per warp: a lane has eight adjacent ones, one in each of eight instructions
constexpr int kOuterRows = 16;     // per warp at a time: a lane has four
constexpr int kOuterOfLane = 8;
constexpr int kOuterSums = kOuterRanks * kOuterColumns;

// Return the lower halves of two words, or their upper halves.
__device__ __forceinline__ uint32_t lower_halves(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x5410); }
__device__ __forceinline__ uint32_t upper_halves(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x7632); }

__device__ __forceinline__ uint32_t word_of(const uint4& vector, int i) {
  return i == 0 ? vector.x : i == 1 ? vector.y : i == 2 ? vector.z : vector.w;
}

// The rows of x that a lane reads out of 16: two adjacent ones in each half; -1 for a missing row.
template <bool kMasked>
struct OuterPlaces {
  int rows[2][2];

  __device__ __forceinline__ void find(const OuterFactor& args, int first, int end) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = first + threadIdx.x % 4 * 2 + half * 8 + i;
        rows[half][i] = row >= end ? -1 : kMasked || args.row_of == nullptr ? row : args.row_of[row];
      }
    }
  }
};

// A lane's operands in these rows.
template <typename Element, int kTiles, bool kMasked>
struct OuterRows {
  uint4 x[2][2];
  uint32_t grads[kTiles][2][2];
  uint32_t kept[2][2];

  __device__ __forceinline__ void load(const OuterFactor& args, const OuterPlaces<kMasked>& places, int first, int rank,
                                       int column) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = first + threadIdx.x % 4 * 2 + half * 8 + i;
        const int from = places.rows[half][i];
        const bool is_there = from >= 0;
        const Element* const of_x = static_cast<const Element*>(args.x.data) + from * args.x.row_stride + column;
        const Element* const of_rank =
            static_cast<const Element*>(args.grads.data) + row * args.grads.row_stride + rank;
        const bool inside = is_there && column < args.cols;
        x[half][i] = inside ? *reinterpret_cast<const uint4*>(of_x) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          const bool has_rank = is_there && rank + tile * kOuterRanks < args.ranks;
          grads[tile][half][i] = has_rank ? *reinterpret_cast<const uint32_t*>(of_rank + tile * kOuterRanks) : 0;
        }
        if constexpr (kMasked) {
          const uint8_t* const bytes = reinterpret_cast<const uint8_t*>(args.kept.words + row * args.kept.words_of_row);
          kept[half][i] = inside ? bytes[column / 8] : 0;
        }
      }
    }
  }

  // Adds the products of these rows.
  __device__ __forceinline__ void add_to(float (&sums)[kTiles][kOuterOfLane][4]) const {
    uint32_t a[kTiles][4];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        a[tile][2 * half] = lower_halves(grads[tile][half][0], grads[tile][half][1]);
        a[tile][2 * half + 1] = upper_halves(grads[tile][half][0], grads[tile][half][1]);
      }
    }
#pragma unroll
    for (int i = 0; i < kOuterOfLane; ++i) {
      uint32_t b[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t low = word_of(x[half][0], i / 2), high = word_of(x[half][1], i / 2);
        b[half] = i % 2 == 0 ? lower_halves(low, high) : upper_halves(low, high);
        if constexpr (kMasked) {
          b[half] &= ((kept[half][0] | kept[half][1] << 16) >> i & 0x00010001u) * 0xffffu;
        }
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) sm80::Mma<Element>::multiply(sums[tile][i], a[tile], b);
    }
  }
};

// Adds up a warp's rows: all groups of 16 that are `step` apart from the first. Values are prefetched one step ahead,
// and their places two.
template <typename Element, int kTiles, bool kMasked>
__device__ __forceinline__ void sum_rows(const OuterFactor& args, int first, int end, int step, int rank, int column,
                                         float (&sums)[kTiles][kOuterOfLane][4]) {
  OuterPlaces<kMasked> places;
  OuterRows<Element, kTiles, kMasked> next;
  places.find(args, first, end);
  next.load(args, places, first, rank, column);
  places.find(args, first + step, end);
#pragma unroll 1
  for (; first < end; first += step) {
    const OuterRows<Element, kTiles, kMasked> rows = next;
    next.load(args, places, first + step, rank, column);
    places.find(args, first + 2 * step, end);
    rows.add_to(sums);
  }
}

// The sums over rows of a CTA's warps, and of a cluster's CTAs, are added in order.
template <typename Element, int kTiles>
__global__ void __launch_bounds__(kOuterThreads, 2) masked_outer_kernel(const __grid_constant__ OuterFactor args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ float of_warps[kOuterWarps][kOuterSums];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = cluster_rank(), parts = gridDim.x;
  const int first_column = blockIdx.y * kOuterColumns, first_rank = blockIdx.z * kTiles * kOuterRanks;
  float sums[kTiles][kOuterOfLane][4] = {};
  sum_rows<Element, kTiles, true>(args, (part * kOuterWarps + warp) * kOuterRows, static_cast<int>(args.rows),
                                  parts * kOuterWarps * kOuterRows, first_rank + lane / 4 * 2,
                                  first_column + lane / 4 * kOuterOfLane, sums);
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < kOuterOfLane; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        // The instruction's upper rows are the even ranks, and its lower rows the odd ranks after them.
        const int rank = lane / 4 * 2 + j / 2, column = (lane % 4 * 2 + j % 2) * kOuterOfLane + i;
        of_warps[warp][rank * kOuterColumns + column] = sums[tile][i][j];
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kOuterSums; i += kOuterThreads) {
      float sum = 0.0f;
#pragma unroll
      for (int source = 0; source < kOuterWarps; ++source) sum += of_warps[source][i];
      of_warps[0][i] = sum;
    }
    cluster_sync();
    for (int i = part * kOuterThreads + threadIdx.x; i < kOuterSums; i += parts * kOuterThreads) {
      const int rank = first_rank + tile * kOuterRanks + i / kOuterColumns, column = first_column + i % kOuterColumns;
      if (rank >= args.ranks || column >= args.cols) continue;
      const uint32_t address = shared_address(&of_warps[0][i]);
      float sum = 0.0f;
      for (int source = 0; source < parts; ++source) {
        float term;
        asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(term) : "r"(map_to_rank(address, source)) : "memory");
        sum += term;
      }
      static_cast<Element*>(args.out.data)[rank * args.out.row_stride + column] = from_float<Element>(args.scale * sum);
    }
    cluster_sync();  // no CTA overwrites sums, or exits, while the others still read them
  }
#endif
}

// A warp has 64 columns of an expert, and all of its rows.
template <typename Element, int kTiles>
__global__ void __launch_bounds__(kOuterThreads) expert_outer_kernel(const __grid_constant__ OuterFactor args) {
  const int lane = threadIdx.x % 32, first_rank = blockIdx.y * kTiles * kOuterRanks;
  const int first_column = (blockIdx.x * kOuterWarps + threadIdx.x / 32) * kOuterColumns;
  if (first_column >= args.cols) return;
  const RowRange range = args.ranges[blockIdx.z];
  float sums[kTiles][kOuterOfLane][4] = {};
  sum_rows<Element, kTiles, false>(args, range.first, range.first + range.count, kOuterRows, first_rank + lane / 4 * 2,
                                   first_column + lane / 4 * kOuterOfLane, sums);
  Element* const out = static_cast<Element*>(args.out.data) + blockIdx.z * args.ranks * args.out.row_stride;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int rank = first_rank + tile * kOuterRanks + lane / 4 * 2 + j / 2;
      const int column = first_column + (lane % 4 * 2 + j % 2) * kOuterOfLane;
      if (rank >= args.ranks || column >= args.cols) continue;
      float values[kOuterOfLane];
#pragma unroll
      for (int i = 0; i < kOuterOfLane; ++i) values[i] = args.scale * sums[tile][i][j];
      store(out + rank * args.out.row_stride + column, values);
    }
  }
}

}  // namespace fused_mlp::sm90
