// The sums of every expert's rows, which are the gradients of its biases. A CTA has some columns of an expert, in whole
// cache lines. Its threads divide the rows among them and add up their sums in the order of the threads.
#pragma once

#include "../../vector.cuh"
#include "steps.h"

namespace fused_mlp {

constexpr int kExpertSumThreads = 256;
constexpr int kExpertSumColumns = 64;
constexpr int kExpertSumUnroll = 4;  // rows that a thread has in flight

template <typename Element>
__global__ void __launch_bounds__(kExpertSumThreads) expert_sums_kernel(const __grid_constant__ ExpertSums args) {
  using Vec = Packed<Element, 8>;
  constexpr int kLanes = kExpertSumColumns / 8, kRows = kExpertSumThreads / kLanes;
  __shared__ float of_rows[kRows][kExpertSumColumns + 1];
  const int lane = threadIdx.x % kLanes, first_row = threadIdx.x / kLanes;
  const int first = blockIdx.x * kExpertSumColumns, column = first + lane * 8;
  const RowRange range{__ldg(&args.ranges[blockIdx.y].first), __ldg(&args.ranges[blockIdx.y].count)};
  float sums[8] = {};
  if (column < args.columns) {
    const auto* rows = static_cast<const Element*>(args.rows) + int64_t{range.first} * args.columns + column;
    for (int row = first_row; row < range.count; row += kRows * kExpertSumUnroll) {
      Vec values[kExpertSumUnroll] = {};
      float weights[kExpertSumUnroll];
#pragma unroll
      for (int u = 0; u < kExpertSumUnroll; ++u) {
        const int at = row + u * kRows;
        const bool is_there = at < range.count;
        if (is_there) values[u] = *reinterpret_cast<const Vec*>(rows + int64_t{at} * args.columns);
        weights[u] = is_there && args.row_weights != nullptr ? __ldg(args.row_weights + range.first + at) : 1.0f;
      }
#pragma unroll
      for (int u = 0; u < kExpertSumUnroll; ++u) {
#pragma unroll
        for (int i = 0; i < 8; ++i) sums[i] = fmaf(weights[u], values[u].lane(i), sums[i]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) of_rows[first_row][lane * 8 + i] = sums[i];
  __syncthreads();
  const int mine = first + static_cast<int>(threadIdx.x);
  if (threadIdx.x >= kExpertSumColumns || mine >= args.columns) return;
  float total = 0.0f;
  for (int row = 0; row < kRows; ++row) total += of_rows[row][threadIdx.x];
  static_cast<Element*>(args.out)[int64_t{blockIdx.y} * args.columns + mine] = from_float<Element>(total);
}

}  // namespace fused_mlp
