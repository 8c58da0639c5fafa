// The kernel that sums the columns of a matrix, separate from its launch so that device-only compilers can compile this
// file.
#pragma once

#include "../vector.cuh"
#include "column_sums.h"

namespace fused_mlp {

constexpr int kColumnSumThreads = 512;
constexpr int kSumColumns = 32;  // columns that a block adds up
constexpr int kSumUnroll = 6;    // rows that a thread has in flight

// The number of rows that a block reads at once: neighbouring threads share a row.
template <int Width>
constexpr int kSumRows = kColumnSumThreads / (kSumColumns / Width);

// Where sums are stored: each part's sums are adjacent in memory.
template <typename Out>
struct AdjacentSums {
  Out* out;
  int64_t cols;

  __device__ __forceinline__ void put(unsigned part, int64_t col, float sum) const {
    out[part * cols + col] = from_float<Out>(sum);
  }
};

// Each group of columns has its own target.
struct GroupedSums {
  SumTargets targets;
  int64_t cols;

  __device__ __forceinline__ void put(unsigned, int64_t col, float sum) const {
    const int64_t group = col / cols, at = col - group * cols;
#pragma unroll
    for (int i = 0; i < kMostSumGroups; ++i) {
      void* const target = targets.of[i];
      if (i != group || target == nullptr) continue;
      switch (targets.dtypes[i]) {
        case DType::kFloat32:
          static_cast<float*>(target)[at] = sum;
          break;
        case DType::kFloat16:
          static_cast<__half*>(target)[at] = from_float<__half>(sum);
          break;
        case DType::kBFloat16:
          static_cast<__nv_bfloat16*>(target)[at] = from_float<__nv_bfloat16>(sum);
          break;
      }
    }
  }
};

// A block sums the rows of its columns from `begin` to `end`, and calls put(column, sum) for each. A thread adds up a
// few rows and then adds that to its sums, always in the same order. So results are the same on every call, and
// rounding errors stay small with many rows.
template <typename In, int Width, typename Put>
__device__ __forceinline__ void sum_columns(const Matrix& x, int64_t begin, int64_t end, int64_t first, int64_t cols,
                                            const Put& put) {
  using Vec = Packed<In, Width>;
  constexpr int kLanes = kSumColumns / Width, kWarps = kColumnSumThreads / 32;
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / 32;
  const int64_t col = first + lane * Width;
  const In* source = static_cast<const In*>(x.data) + col;

  float sums[Width] = {};
  if (col < cols) {
    for (int64_t row = begin + threadIdx.x / kLanes; row < end; row += kSumRows<Width> * kSumUnroll) {
      Vec values[kSumUnroll] = {};
#pragma unroll
      for (int u = 0; u < kSumUnroll; ++u) {
        const int64_t at = row + u * kSumRows<Width>;
        if (at < end) values[u] = *reinterpret_cast<const Vec*>(source + at * x.row_stride);
      }
#pragma unroll
      for (int i = 0; i < Width; ++i) {
        float sum = values[0].lane(i);
#pragma unroll
        for (int u = 1; u < kSumUnroll; ++u) sum += values[u].lane(i);
        sums[i] += sum;
      }
    }
  }

  __shared__ float of_warps[kWarps][kSumColumns];
#pragma unroll
  for (int i = 0; i < Width; ++i) {
#pragma unroll
    for (int lanes = kLanes; lanes < 32; lanes *= 2) sums[i] += __shfl_xor_sync(0xffffffff, sums[i], lanes);
    if (threadIdx.x % 32 < kLanes) of_warps[warp][lane * Width + i] = sums[i];
  }
  __syncthreads();
  if (threadIdx.x >= kSumColumns) return;
  float total = 0.0f;
#pragma unroll
  for (const auto& of_warp : of_warps) total += of_warp[threadIdx.x];
  const int64_t summed = first + threadIdx.x;
  if (summed < cols) put(summed, total);
}

// One block for each part of the rows, of `part_rows`, and each group of columns.
template <typename In, typename Sums, int Width>
__global__ void __launch_bounds__(kColumnSumThreads, 2)
    column_sums_kernel(Matrix x, int64_t rows, int64_t cols, int64_t part_rows, Sums out) {
  const int64_t begin = int64_t{blockIdx.y} * part_rows, end = min(rows, begin + part_rows);
  sum_columns<In, Width>(x, begin, end, int64_t{blockIdx.x} * kSumColumns, cols,
                         [&](int64_t col, float sum) { out.put(blockIdx.y, col, sum); });
}

// One block for each group of columns of each matrix.
template <typename In, int Width>
__global__ void __launch_bounds__(kColumnSumThreads, 2)
    joint_sums_kernel(const __grid_constant__ SumSources sources, int64_t rows) {
  int64_t block = blockIdx.x;
#pragma unroll
  for (int i = 0; i < kMostSumGroups; ++i) {
    const auto& source = sources.of[i];
    const int64_t blocks = (source.cols + kSumColumns - 1) / kSumColumns;
    if (block >= 0 && block < blocks) {
      sum_columns<In, Width>(source.x, 0, rows, block * kSumColumns, source.cols,
                             [&](int64_t col, float sum) { static_cast<In*>(source.out)[col] = from_float<In>(sum); });
    }
    block -= blocks;
  }
}

}  // namespace fused_mlp
