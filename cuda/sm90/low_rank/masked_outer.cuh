// The kernel of MaskedOuter.
#pragma once

#include "../../gemm/dropped.h"
#include "../../sm80/ptx.cuh"
#include "../../vector.cuh"
#include "../ptx.cuh"

namespace fused_mlp::sm90 {

constexpr int kOuterThreads = 256, kOuterWarps = kOuterThreads / 32;
constexpr int kOuterRanks = 16;    // of a CTA: a lane has two that are adjacent
constexpr int kOuterColumns = 64;  // of a CTA: a lane has eight that are adjacent, one in each of eight instructions
constexpr int kOuterRows = 16;     // of a warp at a time: a lane has four
constexpr int kOuterOfLane = 8;
constexpr int kOuterSums = kOuterRanks * kOuterColumns;

// The lower halves of two words, and their upper halves.
__device__ __forceinline__ uint32_t lower_halves(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x5410); }
__device__ __forceinline__ uint32_t upper_halves(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x7632); }

// A product's sums over rows go through the warps of a CTA and the CTAs of a cluster, and are added in their order.
template <typename Element>
__global__ void __launch_bounds__(kOuterThreads) masked_outer_kernel(const __grid_constant__ MaskedOuter args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ float of_warps[kOuterWarps][kOuterSums];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = cluster_rank(), parts = gridDim.x;
  const int column = blockIdx.y * kOuterColumns + lane / 4 * kOuterOfLane, rank = blockIdx.z * kOuterRanks + lane / 4 * 2;
  const int rows = static_cast<int>(args.rows), ranks = static_cast<int>(args.ranks);
  const bool inside = column < args.cols;
  const uint8_t* const kept = reinterpret_cast<const uint8_t*>(args.kept.words) + column / 8;
  float sums[kOuterOfLane][4] = {};
#pragma unroll 1
  for (int first = (part * kOuterWarps + warp) * kOuterRows; first < rows; first += parts * kOuterWarps * kOuterRows) {
    uint32_t a[4], b[kOuterOfLane][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint4 x[2] = {};
      uint32_t of_rank[2] = {}, bits[2] = {};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = first + lane % 4 * 2 + half * 8 + i;
        if (row >= rows) continue;
        if (inside) {
          x[i] = *reinterpret_cast<const uint4*>(static_cast<const Element*>(args.x.data) + row * args.x.row_stride +
                                                 column);
          bits[i] = kept[row * args.kept.words_of_row * 4];
        }
        const Element* const of_row = static_cast<const Element*>(args.grads.data) + row * args.grads.row_stride + rank;
        if (rank < ranks) of_rank[i] = *reinterpret_cast<const uint32_t*>(of_row);
      }
      a[2 * half] = lower_halves(of_rank[0], of_rank[1]);
      a[2 * half + 1] = rank + 1 < ranks ? upper_halves(of_rank[0], of_rank[1]) : 0;
      const uint32_t both = bits[0] | bits[1] << 16;
      const uint32_t low[4] = {x[0].x, x[0].y, x[0].z, x[0].w}, high[4] = {x[1].x, x[1].y, x[1].z, x[1].w};
#pragma unroll
      for (int i = 0; i < kOuterOfLane; ++i) {
        const uint32_t pair = i % 2 == 0 ? lower_halves(low[i / 2], high[i / 2]) : upper_halves(low[i / 2], high[i / 2]);
        b[i][half] = pair & (both >> i & 0x00010001u) * 0xffffu;
      }
    }
#pragma unroll
    for (int i = 0; i < kOuterOfLane; ++i) sm80::Mma<Element>::multiply(sums[i], a, b[i]);
  }
#pragma unroll
  for (int i = 0; i < kOuterOfLane; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      // Rank 2 (lane / 4) of an instruction's upper rows, the one behind it of the lower ones.
      const int at_rank = lane / 4 * 2 + j / 2, at_column = (lane % 4 * 2 + j % 2) * kOuterOfLane + i;
      of_warps[warp][at_rank * kOuterColumns + at_column] = sums[i][j];
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
    const int at_rank = blockIdx.z * kOuterRanks + i / kOuterColumns;
    const int at_column = blockIdx.y * kOuterColumns + i % kOuterColumns;
    if (at_rank >= ranks || at_column >= args.cols) continue;
    const uint32_t address = shared_address(&of_warps[0][i]);
    float sum = 0.0f;
    for (int source = 0; source < parts; ++source) {
      float term;
      asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(term) : "r"(map_to_rank(address, source)) : "memory");
      sum += term;
    }
    static_cast<Element*>(args.out.data)[at_rank * args.out.row_stride + at_column] =
        from_float<Element>(args.scale * sum);
  }
  cluster_sync();  // no CTA exits while the others still read its sums
#endif
}

}  // namespace fused_mlp::sm90
