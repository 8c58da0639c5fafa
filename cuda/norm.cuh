// The kernel of LayerNorm and RMSNorm, which may add a residual first. Apart from its launch, so that a compiler of
// device code alone takes this file.
#pragma once

#include "norm.h"
#include "vector.cuh"

namespace fused_mlp {

constexpr int kNormThreads = 256;
constexpr int kNormVectors = 4;  // that each thread keeps in registers; what is beyond them is read again

struct Sums {
  float first, second;
};

// Sums over the threads of a row, for all of them: over a warp, or over a block of whole warps.
__device__ __forceinline__ Sums over_row(Sums sums, Sums (&of_warps)[kNormThreads / 32]) {
  constexpr unsigned kAll = 0xffffffff;
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    sums.first += __shfl_xor_sync(kAll, sums.first, lanes);
    sums.second += __shfl_xor_sync(kAll, sums.second, lanes);
  }
  if (blockDim.x == 32) return sums;
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sums;
  __syncthreads();
  sums = of_warps[0];
  for (unsigned warp = 1; warp < blockDim.x / 32; ++warp) {
    sums.first += of_warps[warp].first;
    sums.second += of_warps[warp].second;
  }
  return sums;
}

// The mean square without that of the mean that is left in it. What has overflowed stays infinite, and NaN passes.
__device__ __forceinline__ float variance_of(float mean_square, float mean) {
  const float square = mean * mean;
  if (square < mean_square) return mean_square - square;
  return mean_square < 3e38f ? 0.0f : mean_square;
}

// blockDim.x threads for a row; where that is a warp, blockDim.y rows for a block. The mean is taken first, so that the
// squares are of small numbers, and corrected by what is left of it in the second pass: a row of equal values gives 0.
// Where it is not centred, the mean counts as 0.
template <typename T, int Width>
__global__ void __launch_bounds__(kNormThreads) norm_kernel(const __grid_constant__ Norm p) {
  using Vec = Vector<T, Width>;
  __shared__ Sums of_warps[2][kNormThreads / 32];
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (row >= p.rows) return;
  const T* const x = static_cast<const T*>(p.x.data) + row * p.x.row_stride;
  const T* const residual =
      p.residual.data == nullptr ? nullptr : static_cast<const T*>(p.residual.data) + row * p.residual.row_stride;
  T* const out = static_cast<T*>(p.out.data) + row * p.out.row_stride;
  const int64_t first = int64_t{threadIdx.x} * Width, step = int64_t{blockDim.x} * Width;

  struct Values {
    float lane[Width];
  };
  const auto sum_at = [&](int64_t col) {
    const Vec a = *reinterpret_cast<const Vec*>(x + col);
    Vec b;
    if (residual != nullptr) b = *reinterpret_cast<const Vec*>(residual + col);
    Values sum;
#pragma unroll
    for (int i = 0; i < Width; ++i) {
      sum.lane[i] = to_float(a.lane[i]);
      if (residual != nullptr) sum.lane[i] += to_float(b.lane[i]);
    }
    return sum;
  };
  Values kept[kNormVectors];
#pragma unroll
  for (int v = 0; v < kNormVectors; ++v) {
    const int64_t col = first + v * step;
    if (col < p.cols) kept[v] = sum_at(col);
  }
  const auto for_each = [&](const auto& body) {
#pragma unroll
    for (int v = 0; v < kNormVectors; ++v) {
      const int64_t col = first + v * step;
      if (col < p.cols) body(col, kept[v]);
    }
    for (int64_t col = first + kNormVectors * step; col < p.cols; col += step) body(col, sum_at(col));
  };

  const float share = 1.0f / static_cast<float>(p.cols);
  Sums sums{};
  float mean = 0.0f;
  if (p.centred) {
    for_each([&](int64_t, const Values& values) {
#pragma unroll
      for (int i = 0; i < Width; ++i) sums.first = fmaf(values.lane[i], share, sums.first);  // which does not overflow
    });
    mean = over_row(sums, of_warps[0]).first;
    sums = {};
  }
  for_each([&](int64_t, const Values& values) {
#pragma unroll
    for (int i = 0; i < Width; ++i) {
      const float centred = values.lane[i] - mean;
      sums.first += centred;
      sums.second = fmaf(centred, centred, sums.second);
    }
  });
  sums = over_row(sums, of_warps[1]);
  const float left = p.centred ? sums.first * share : 0.0f;
  const float scale = 1.0f / sqrtf(variance_of(sums.second * share, left) + p.eps);
  for_each([&](int64_t col, const Values& values) {
    Vec weight, bias, result;
    if (p.weight != nullptr) weight = *reinterpret_cast<const Vec*>(static_cast<const T*>(p.weight) + col);
    if (p.bias != nullptr) bias = *reinterpret_cast<const Vec*>(static_cast<const T*>(p.bias) + col);
#pragma unroll
    for (int i = 0; i < Width; ++i) {
      float value = (values.lane[i] - mean - left) * scale;
      if (p.weight != nullptr) value *= to_float(weight.lane[i]) + p.weight_offset;
      if (p.bias != nullptr) value += to_float(bias.lane[i]);
      result.lane[i] = from_float<T>(value);
    }
    *reinterpret_cast<Vec*>(out + col) = result;
  });
}

}  // namespace fused_mlp
