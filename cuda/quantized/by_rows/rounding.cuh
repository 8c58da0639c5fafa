// Rounds rows to e4m3 with one scale per row, after an activation and a gate if there are any.
#pragma once

#include <algorithm>

#include "../../gemm/epilogue.cuh"
#include "../../overlap.cuh"
#include "../../vector.cuh"
#include "../e4m3.cuh"
#include "rounding.h"

namespace fused_mlp {

// A CTA has a row, which stays in registers between the search for its largest value and the rounding. A thread has
// kVectors of it; with few, and without a gate, more CTAs have room.
template <int kVectors_, bool kGated_>
struct RowsOfE4m3 {
  using Element = __nv_bfloat16;
  static constexpr bool kGated = kGated_;
  static constexpr int kVectors = kVectors_, kValues = kVectorBytes / sizeof(Element);
  static constexpr int kMostThreads = 1024, kMostColumns = kMostThreads * kVectors * kValues;
  using Row = Packed<Element, kValues>;

  static int threads(int64_t columns) {
    return std::max(64, static_cast<int>(ceil_div(columns, int64_t{32} * kValues * kVectors)) * 32);
  }
};

__device__ __forceinline__ float largest_of_cta(float largest) {
  __shared__ float of_warps[32];
  const auto of_warp = [](float value) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      value = fmaxf(value, __shfl_xor_sync(~0u, value, distance));
    }
    return value;
  };
  largest = of_warp(largest);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
  __syncthreads();
  return of_warp(threadIdx.x % 32 < blockDim.x / 32 ? of_warps[threadIdx.x % 32] : 0.0f);
}

template <typename R>
__global__ void __launch_bounds__(R::kMostThreads) round_rows_kernel(const __grid_constant__ RowRounding args) {
  wait_for_previous_kernel();
  const int64_t row = blockIdx.x;
  const auto* const x = static_cast<const typename R::Element*>(args.x.data) + row * args.x.row_stride;
  const auto* const up = static_cast<const typename R::Element*>(args.up.data) + row * args.up.row_stride;
  const CodedActivation<typename R::Element> activate{args.activation};
  const bool changes = args.activation != static_cast<int64_t>(Activation::kLinear);
  const auto column_of = [&](int i) { return (int64_t{i} * blockDim.x + threadIdx.x) * R::kValues; };

  typename R::Row kept[R::kVectors] = {}, ups[R::kVectors] = {};
#pragma unroll
  for (int i = 0; i < R::kVectors; ++i) {
    if (column_of(i) >= args.columns) continue;
    kept[i] = *reinterpret_cast<const typename R::Row*>(x + column_of(i));
    if (R::kGated) ups[i] = *reinterpret_cast<const typename R::Row*>(up + column_of(i));
  }
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < R::kVectors; ++i) {
    if (column_of(i) >= args.columns) continue;
    float values[R::kValues];
#pragma unroll
    for (int j = 0; j < R::kValues; ++j) values[j] = kept[i].lane(j);
    if (changes) activate(values);
#pragma unroll
    for (int j = 0; j < R::kValues; ++j) {
      if (R::kGated) values[j] *= ups[i].lane(j);
      largest = fmaxf(largest, fabsf(values[j]));
    }
#pragma unroll
    for (int j = 0; j < R::kValues / 2; ++j) {
      kept[i].words[j] = round_pair<typename R::Element>(values[2 * j], values[2 * j + 1]);
      asm volatile("" : "+r"(kept[i].words[j]));  // else the floats stay, in twice as many registers
    }
  }
  const float scale = e4m3_scale(largest_of_cta(largest)), inverse = __frcp_rn(scale);
  // value / scale, as __fdiv_rn would return it in almost all cases, by fewer instructions.
  const auto divided = [&](float value) {
    const float quotient = value * inverse;
    return fmaf(fmaf(-quotient, scale, value), inverse, quotient);
  };
#pragma unroll
  for (int i = 0; i < R::kVectors; ++i) {
    if (column_of(i) >= args.columns) continue;
    uint32_t pairs[R::kValues / 2];
#pragma unroll
    for (int j = 0; j < R::kValues / 2; ++j) {
      pairs[j] = e4m3_pair(divided(kept[i].lane(2 * j)), divided(kept[i].lane(2 * j + 1)));
    }
    *reinterpret_cast<uint2*>(args.data + row * args.columns + column_of(i)) =
        make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
  }
  if (threadIdx.x == 0) args.scales[row] = scale;
}

}  // namespace fused_mlp
