// Decodes weights of all experts into memory: to values in 16 or 32 bits.
#pragma once

#include <cuda_fp8.h>

#include "../../vector.cuh"
#include "decode_stack.h"

namespace fused_mlp::stacks {

constexpr int kThreads = 256;
constexpr int kVector = 8;  // values that a thread decodes at a time, in a row

__device__ __forceinline__ float fp8_value(uint32_t bits) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(static_cast<uint8_t>(bits), __NV_E4M3)));
}

// A sign, two bits of exponent and one of mantissa.
__device__ __forceinline__ float fp4_value(uint32_t code) {
  const uint32_t exponent = code >> 1 & 3, mantissa = code & 1;
  const uint32_t twice = exponent == 0 ? mantissa : (2 + mantissa) << (exponent - 1);
  return (code & 8 ? -0.5f : 0.5f) * static_cast<float>(twice);
}

__device__ __forceinline__ float value_of(const StackElements& weight, int64_t at) {
  if (weight.coding == StackCoding::kFp8) return fp8_value(__ldg(weight.data + at));
  return fp4_value(__ldg(weight.data + at / 2) >> at % 2 * 4);
}

// A power of two is given by its exponent, 127 too large; 255 stands for NaN.
__device__ __forceinline__ float scale_of(const StackElements& weight, int64_t at) {
  if (weight.coding == StackCoding::kFp8) return __ldg(static_cast<const float*>(weight.scales) + at);
  const uint32_t exponent = __ldg(static_cast<const uint8_t*>(weight.scales) + at);
  return __uint_as_float(exponent == 0 ? 0x00400000u : exponent == 255 ? 0x7FFFFFFFu : exponent << 23);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) decode_stack_kernel(StackElements weight, T* out) {
  const int64_t of_row = ceil_div(weight.k, kVector), vectors = weight.experts * weight.rows * of_row;
  const int64_t scales_of_row = ceil_div(weight.k, weight.block);
  const int64_t blocks_of_expert = ceil_div(weight.rows, weight.block_rows);
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < vectors;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    const int64_t row = i / of_row, column = i % of_row * kVector;
    const int64_t block_row = row / weight.rows * blocks_of_expert + row % weight.rows / weight.block_rows;
    const int count = static_cast<int>(min(static_cast<int64_t>(kVector), weight.k - column));
    for (int j = 0; j < count; ++j) {
      const int64_t at = row * weight.k + column + j;
      const float scale = scale_of(weight, block_row * scales_of_row + (column + j) / weight.block);
      out[at] = from_float<T>(value_of(weight, at) * scale);
    }
  }
}

// The same of rows of whole vectors, each of which lies within a block: they are read and written at once.
template <typename T>
__global__ void __launch_bounds__(kThreads) decode_stack_vectors_kernel(StackElements weight, T* out) {
  const int64_t of_row = weight.k / kVector, vectors = weight.experts * weight.rows * of_row;
  const int64_t scales_of_row = ceil_div(weight.k, weight.block);
  const int64_t blocks_of_expert = ceil_div(weight.rows, weight.block_rows);
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= vectors) return;
  const int64_t row = i / of_row, column = i % of_row * kVector;
  const int64_t block_row = row / weight.rows * blocks_of_expert + row % weight.rows / weight.block_rows;
  const float scale = scale_of(weight, block_row * scales_of_row + column / weight.block);
  constexpr int kWidth = kVectorBytes / sizeof(T);
  uint2 words{};
  if (weight.coding == StackCoding::kFp8) {
    words = __ldg(reinterpret_cast<const uint2*>(weight.data) + i);
  } else {
    words.x = __ldg(reinterpret_cast<const uint32_t*>(weight.data) + i);
  }
#pragma unroll
  for (int part = 0; part < kVector; part += kWidth) {
    float values[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const int at = part + j;
      const float value = weight.coding == StackCoding::kFp8 ? fp8_value((at < 4 ? words.x : words.y) >> at % 4 * 8)
                                                             : fp4_value(words.x >> at * 4);
      values[j] = value * scale;
    }
    store<T, kWidth>(out + i * kVector + part, values);
  }
}

}  // namespace fused_mlp::stacks
