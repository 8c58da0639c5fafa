// The kernel of rank_rows.h.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "../../overlap.cuh"
#include "../ptx.cuh"
#include "rank_rows.h"

namespace fused_mlp::sm90 {

constexpr int kRankThreads = 256, kRankWarps = kRankThreads / 32;
constexpr int kRankCluster = 8;   // CTAs that share k
constexpr int kClusterRanks = 8;  // weight rows per cluster: the N dimension of the tensor cores' instruction
constexpr int kRankTokens = 16;   // rows of x per tile: its M dimension
constexpr int kRankBlockK = 32;   // elements of k that a warp multiplies at a time
constexpr int kRankTiles = kMostRankRows / kRankTokens;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Computes d += a b for a [16, 16] and b [16, 8], in the layout of mma.sync.
template <typename Element>
__device__ __forceinline__ void multiply_by_mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                                uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<Element, __half>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

// Returns eight elements of a row, or zeros outside the matrix.
template <typename Element>
__device__ __forceinline__ uint4 load_vector_of_row(const Matrix& matrix, int row, int rows, int column, int columns) {
  if (row >= rows || column >= columns) return make_uint4(0, 0, 0, 0);
  return *reinterpret_cast<const uint4*>(static_cast<const Element*>(matrix.data) + row * matrix.row_stride + column);
}

#endif

// The sum over k is independent of the order of its elements within an instruction, so each lane passes eight adjacent
// ones. The cluster's sums are added in the order of its ranks.
template <typename Element>
__global__ void __launch_bounds__(kRankThreads) rank_rows_kernel(const __grid_constant__ RankRows p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ alignas(16) float of_warps[kRankWarps][kMostRankRows * kClusterRanks];
  __shared__ alignas(16) float of_cta[kMostRankRows * kClusterRanks];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = cluster_rank();
  int group = blockIdx.x / kRankCluster;
  const int first_groups = static_cast<int>((p.factors[0].rank + kClusterRanks - 1) / kClusterRanks);
  const RankFactor& factor = p.factors[group < first_groups ? 0 : 1];
  if (group >= first_groups) group -= first_groups;
  const int first_rank = group * kClusterRanks;
  const int m = static_cast<int>(p.m), k = static_cast<int>(p.k), ranks = static_cast<int>(factor.rank);
  const int blocks = (k + kRankBlockK - 1) / kRankBlockK;
  const int begin = part * blocks / kRankCluster, end = (part + 1) * blocks / kRankCluster;

  allow_next_kernel();
  {  // prefetch the weights before x is ready
    constexpr int kLine = 128 / sizeof(Element);
    const int row = first_rank + threadIdx.x % kClusterRanks;
    const int column = begin * kRankBlockK + threadIdx.x / kClusterRanks * kLine;
    if (row < ranks && column < min(end * kRankBlockK, k)) {
      const Element* line = static_cast<const Element*>(factor.a.data) + row * factor.a.row_stride + column;
      asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
    }
  }
  wait_for_previous_kernel();

  float sums[kRankTiles][4] = {};
  const int row = lane / 4;
#pragma unroll 4
  for (int block = begin + warp; block < end; block += kRankWarps) {
    const int column = block * kRankBlockK + lane % 4 * 8;
    const uint4 b = load_vector_of_row<Element>(factor.a, first_rank + row, ranks, column, k);
#pragma unroll
    for (int tile = 0; tile < kRankTiles; ++tile) {
      if (tile * kRankTokens >= m) break;
      const uint4 low = load_vector_of_row<Element>(p.x, tile * kRankTokens + row, m, column, k);
      const uint4 high = load_vector_of_row<Element>(p.x, tile * kRankTokens + row + 8, m, column, k);
      multiply_by_mma<Element>(sums[tile], low.x, high.x, low.y, high.y, b.x, b.y);
      multiply_by_mma<Element>(sums[tile], low.z, high.z, low.w, high.w, b.z, b.w);
    }
  }
#pragma unroll
  for (int tile = 0; tile < kRankTiles; ++tile) {
    if (tile * kRankTokens >= m) break;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = tile * kRankTokens + row + i / 2 * 8;
      of_warps[warp][token * kClusterRanks + lane % 4 * 2 + i % 2] = sums[tile][i];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < m * kClusterRanks; i += kRankThreads) {
    float sum = 0.0f;
#pragma unroll
    for (int source = 0; source < kRankWarps; ++source) sum += of_warps[source][i];
    of_cta[i] = sum;
  }
  cluster_sync();
  // Each CTA finishes one column.
  const int rank = first_rank + part;
  if (static_cast<int>(threadIdx.x) < m && rank < ranks) {
    const uint32_t address = shared_address(&of_cta[threadIdx.x * kClusterRanks + part]);
    float terms[kRankCluster], sum = 0.0f;
#pragma unroll
    for (int source = 0; source < kRankCluster; ++source) {
      asm volatile("ld.shared::cluster.f32 %0, [%1];"
                   : "=f"(terms[source])
                   : "r"(map_to_rank(address, source))
                   : "memory");
    }
#pragma unroll
    for (int source = 0; source < kRankCluster; ++source) sum += terms[source];
    Element* out = static_cast<Element*>(p.out.data) + threadIdx.x * p.out.row_stride + factor.column + rank;
    *out = static_cast<Element>(factor.scale * sum);
  }
  cluster_sync();  // no CTA exits while the others still read its sums
#endif
}

}  // namespace fused_mlp::sm90
