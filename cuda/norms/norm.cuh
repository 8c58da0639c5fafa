// The kernels of a block's norms and of its residual (norm.h), separate from their launch so that device-only compilers
// can compile this file.
#pragma once

#include "../overlap.cuh"
#include "../vector.cuh"
#include "norm.h"

namespace fused_mlp {

constexpr int kSumThreads = 256;
constexpr int kNormThreads = 512;
constexpr int kNormVectors = 2;  // per thread in registers; anything beyond them is read again

template <int Count>
__device__ __forceinline__ void add_over_warp(float (&sums)[Count]) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
#pragma unroll
    for (float& sum : sums) sum += __shfl_xor_sync(0xffffffff, sum, lanes);
  }
}

// Sums each value over the threads of a row: over a warp, or over a block of whole warps. A kernel calls it once with
// each Count, which has its own shared memory.
template <int Count>
__device__ __forceinline__ void add_over_row(float (&sums)[Count]) {
  __shared__ float of_warps[Count][kNormThreads / 32];
  add_over_warp(sums);
  if (blockDim.x == 32) return;
  const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < Count; ++i) {
    if (lane == 0) of_warps[i][warp] = sums[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < Count; ++i) sums[i] = lane < blockDim.x / 32 ? of_warps[i][lane] : 0.0f;
  add_over_warp(sums);
}

// The mean square minus the square of the remaining mean. Overflowed values stay infinite, and NaN passes through.
__device__ __forceinline__ float variance_of(float mean_square, float mean) {
  const float square = mean * mean;
  if (square < mean_square) return mean_square - square;
  return mean_square < 3e38f ? 0.0f : mean_square;
}

template <typename T, int Width>
__device__ __forceinline__ Packed<T, Width> read_pack(const void* data, int64_t col) {
  return *reinterpret_cast<const Packed<T, Width>*>(static_cast<const T*>(data) + col);
}

// The features of a row, if they are of this type; else null.
template <typename T, bool Wide = false>
__device__ __forceinline__ const T* features_of(const Features& features, int64_t row) {
  if (features.wide != Wide) return nullptr;
  return static_cast<const T*>(features.data) + (features.stride == 0 ? 0 : row / features.rows * features.stride);
}

// The same, in float32 if T has 16 bits.
template <typename T>
__device__ __forceinline__ const float* wide_features_of(const Features& features, int64_t row) {
  return sizeof(T) == sizeof(float) ? nullptr : features_of<float, true>(features, row);
}

template <int Width>
struct Floats {
  float lane[Width];
};

template <int Width>
__device__ __forceinline__ Floats<Width> read_floats(const float* data) {
  Floats<Width> read;
  if constexpr (Width % 4 == 0) {
#pragma unroll
    for (int v = 0; v < Width; v += 4) {
      const float4 four = *reinterpret_cast<const float4*>(data + v);
      read.lane[v] = four.x, read.lane[v + 1] = four.y, read.lane[v + 2] = four.z, read.lane[v + 3] = four.w;
    }
  } else {
    read.lane[0] = *data;
  }
  return read;
}

// residual + factor * x, one pack per thread; with a weight, x times the weight. A block has blockDim.y rows; its
// blockDim.x packs are one of `parts` parts of a row.
template <typename T, int Width>
__global__ void __launch_bounds__(kSumThreads) sum_kernel(const __grid_constant__ NormRows p, unsigned parts) {
  wait_for_previous_kernel();
  const int64_t row = int64_t{blockIdx.x / parts} * blockDim.y + threadIdx.y;
  const int64_t col = (int64_t{blockIdx.x % parts} * blockDim.x + threadIdx.x) * Width;
  if (row >= p.rows || col >= p.cols) return;
  const Norm& norm = p.norm;
  const auto x = read_pack<T, Width>(p.x.data, row * p.x.row_stride + col);
  const auto residual = read_pack<T, Width>(p.residual.data, row * p.residual.row_stride + col);
  float sums[Width];
#pragma unroll
  for (int i = 0; i < Width; ++i) sums[i] = x.lane(i);
  if (const T* const weight = features_of<T>(norm.weight, row)) {
    const auto pack = read_pack<T, Width>(weight, col);
#pragma unroll
    for (int i = 0; i < Width; ++i) sums[i] *= pack.lane(i);
  }
  if (const float* const weight = wide_features_of<T>(norm.weight, row)) {
    const auto floats = read_floats<Width>(weight + col);
#pragma unroll
    for (int i = 0; i < Width; ++i) sums[i] *= floats.lane[i];
  }
#pragma unroll
  for (int i = 0; i < Width; ++i) sums[i] = fmaf(sums[i], norm.factor, residual.lane(i));
  store(static_cast<T*>(p.out.data) + row * p.out.row_stride + col, sums);
}

// blockDim.x threads per row; if that is a warp, blockDim.y rows per block. A thread starts all its reads, including
// those of the weights, before it waits for the first. Two blocks of the maximum size fit on a multiprocessor, so that
// one reads while the other waits for its sums. If the norm is centred, the mean is computed first, so that the squares
// are of small numbers, and its rounding error is corrected in the second pass: a row of equal values gives 0.
template <typename T, int Width, bool Centred, Residual Place>
__global__ void __launch_bounds__(kNormThreads, 2) norm_kernel(const __grid_constant__ NormRows p) {
  wait_for_previous_kernel();
  allow_next_kernel();  // not earlier: the next kernel reads weights at once, which an earlier one may have written
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (row >= p.rows) return;
  const Norm& norm = p.norm;
  const T* const x = static_cast<const T*>(p.x.data) + row * p.x.row_stride;
  const T* const residual = static_cast<const T*>(p.residual.data) + row * p.residual.row_stride;
  const T *const weight = features_of<T>(norm.weight, row), *const bias = features_of<T>(norm.bias, row);
  const float* const wide_weight = wide_features_of<T>(norm.weight, row);
  const float* const wide_bias = wide_features_of<T>(norm.bias, row);
  T* const out = static_cast<T*>(p.out.data) + row * p.out.row_stride;
  const unsigned first = threadIdx.x * Width, step = blockDim.x * Width;

  struct Terms {
    Packed<T, Width> x, residual, weight, bias;
  };
  struct Values {
    float lane[Width];
  };
  const auto terms_at = [&](int64_t col) {
    Terms terms;
    terms.x = read_pack<T, Width>(x, col);
    if (Place != Residual::kNone) terms.residual = read_pack<T, Width>(residual, col);
    if (weight != nullptr) terms.weight = read_pack<T, Width>(weight, col);
    if (bias != nullptr) terms.bias = read_pack<T, Width>(bias, col);
    return terms;
  };
  const auto add_residual = [&](Values& values, const Terms& terms) {
#pragma unroll
    for (int i = 0; i < Width; ++i) values.lane[i] = fmaf(values.lane[i], norm.factor, terms.residual.lane(i));
  };
  const auto values_of = [&](const Terms& terms) {
    Values values;
#pragma unroll
    for (int i = 0; i < Width; ++i) values.lane[i] = terms.x.lane(i);
    if (Place == Residual::kNormed) {
      add_residual(values, terms);
      if (p.sum != nullptr) {
#pragma unroll
        for (float& value : values.lane) value = to_float(from_float<T>(value));
      }
    }
    return values;
  };
  Terms kept[kNormVectors];
#pragma unroll
  for (int v = 0; v < kNormVectors; ++v) {
    if (first + v * step < p.cols) kept[v] = terms_at(first + v * step);
  }
  const auto for_each = [&](const auto& body) {
#pragma unroll
    for (int v = 0; v < kNormVectors; ++v) {
      if (first + v * step < p.cols) body(first + v * step, values_of(kept[v]), kept[v]);
    }
#pragma unroll 1
    for (int64_t col = first + kNormVectors * step; col < p.cols; col += step) {
      const Terms terms = terms_at(col);
      body(col, values_of(terms), terms);
    }
  };

  const float share = 1.0f / static_cast<float>(p.cols);
  float mean = 0.0f, left = 0.0f, variance;
  if constexpr (Centred) {
    float sum[1] = {}, moments[2] = {};
    for_each([&](int64_t, const Values& values, const Terms&) {
#pragma unroll
      for (float value : values.lane) sum[0] = fmaf(value, share, sum[0]);  // cannot overflow
    });
    add_over_row(sum);
    mean = sum[0];
    for_each([&](int64_t, const Values& values, const Terms&) {
#pragma unroll
      for (float value : values.lane) {
        moments[0] += value - mean;
        moments[1] = fmaf(value - mean, value - mean, moments[1]);
      }
    });
    add_over_row(moments);
    left = moments[0] * share;
    variance = variance_of(moments[1] * share, left);
  } else {
    float squares[1] = {};
    for_each([&](int64_t, const Values& values, const Terms&) {
#pragma unroll
      for (float value : values.lane) squares[0] = fmaf(value, value, squares[0]);
    });
    add_over_row(squares);
    variance = squares[0] * share;
  }
  const float scale = __frsqrt_rn(variance + norm.eps), weight_offset = norm.weight_offset();
  if (p.statistics != nullptr && threadIdx.x == 0) {
    p.statistics[row] = scale;
    if (Centred) p.statistics[p.rows + row] = mean + left;
  }
  for_each([&](int64_t col, Values values, const Terms& terms) {
    if (Place == Residual::kNormed && p.sum != nullptr) store(static_cast<T*>(p.sum) + row * p.cols + col, values.lane);
#pragma unroll
    for (float& value : values.lane) value = (Centred ? value - mean - left : value) * scale;
    if (norm.rounded) {
#pragma unroll
      for (float& value : values.lane) value = to_float(from_float<T>(value));
    }
    if (weight != nullptr) {
#pragma unroll
      for (int i = 0; i < Width; ++i) values.lane[i] *= terms.weight.lane(i) + weight_offset;
    }
    if (wide_weight != nullptr) {
      const auto floats = read_floats<Width>(wide_weight + col);
#pragma unroll
      for (int i = 0; i < Width; ++i) values.lane[i] *= floats.lane[i] + weight_offset;
    }
    if (bias != nullptr) {
#pragma unroll
      for (int i = 0; i < Width; ++i) values.lane[i] += terms.bias.lane(i);
    }
    if (wide_bias != nullptr) {
      const auto floats = read_floats<Width>(wide_bias + col);
#pragma unroll
      for (int i = 0; i < Width; ++i) values.lane[i] += floats.lane[i];
    }
    if (Place == Residual::kAdded) add_residual(values, terms);
    store(out + col, values.lane);
  });
}

}  // namespace fused_mlp
