// Decodes weights of all experts into memory, as 16-bit or 32-bit values.
#pragma once

#include <cuda_fp8.h>

#include "../../vector.cuh"
#include "grouped.h"

namespace fused_mlp::stacks {

constexpr int kThreads = 256;
constexpr int kVector = 8;  // values of a row that a thread decodes at a time

__device__ __forceinline__ float fp8_value(uint32_t bits) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(static_cast<uint8_t>(bits), __NV_E4M3)));
}

// One sign bit, two exponent bits and one mantissa bit.
__device__ __forceinline__ float fp4_value(uint32_t code) {
  const uint32_t exponent = code >> 1 & 3, mantissa = code & 1;
  const uint32_t twice = exponent == 0 ? mantissa : (2 + mantissa) << (exponent - 1);
  return (code & 8 ? -0.5f : 0.5f) * static_cast<float>(twice);
}

__device__ __forceinline__ float value_of(const StackElements& weight, int64_t at) {
  if (weight.coding == StackCoding::kFp8) return fp8_value(__ldg(weight.data + at));
  return fp4_value(__ldg(weight.data + at / 2) >> at % 2 * 4);
}

// The scale is a power of two, stored as its exponent plus 127; 255 stands for NaN.
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

// Eight values of e4m3 or e2m1 as float.
template <StackCoding kCoding>
__device__ __forceinline__ void values_of(uint2 words, float (&values)[kVector]) {
#pragma unroll
  for (int i = 0; i < kVector; i += 2) {
    __half2 pair;
    if constexpr (kCoding == StackCoding::kFp8) {
      const auto bits = static_cast<__nv_fp8x2_storage_t>((i < 4 ? words.x : words.y) >> i % 4 * 8);
      pair = __half2(__nv_cvt_fp8x2_to_halfraw2(bits, __NV_E4M3));
    } else {  // sign, exponent and mantissa move to their places in float16, whose exponent has another bias
      const uint32_t byte = words.x >> i * 4 & 255, both = byte | byte << 12;
      const uint32_t bits = (both & 0x00070007u) << 9 | (both & 0x00080008u) << 12, factor = 0x74007400u;  // 2^14
      pair = __hmul2(*reinterpret_cast<const __half2*>(&bits), *reinterpret_cast<const __half2*>(&factor));
    }
    const float2 wide = __half22float2(pair);
    values[i] = wide.x;
    values[i + 1] = wide.y;
  }
}

// The same for rows of whole vectors, each of which lies within a block. A warp processes kVectors vectors per lane of
// one row, so it divides only once.
constexpr int kVectors = 4, kRows = kThreads / 32, kRowVectors = 32 * kVectors;  // per lane, per CTA, per warp

template <typename T, StackCoding kCoding>
__global__ void __launch_bounds__(kThreads) decode_stack_vectors_kernel(StackElements weight, T* out) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / 32;
  if (row >= weight.experts * weight.rows) return;
  const int first = blockIdx.y * kRowVectors + threadIdx.x % 32, of_row = static_cast<int>(weight.k / kVector);
  const auto vectors_of_block = static_cast<uint32_t>(min(weight.block, weight.k) / kVector);
  const int64_t blocks_of_expert = ceil_div(weight.rows, weight.block_rows);
  const int64_t block_row = row / weight.rows * blocks_of_expert + row % weight.rows / weight.block_rows;
  const int64_t scales = block_row * ceil_div(weight.k, weight.block);
  uint2 words[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int vector = first + i * 32;
    if (vector >= of_row) continue;
    const int64_t at = row * of_row + vector;
    if constexpr (kCoding == StackCoding::kFp8) {
      words[i] = __ldg(reinterpret_cast<const uint2*>(weight.data) + at);
    } else {
      words[i].x = __ldg(reinterpret_cast<const uint32_t*>(weight.data) + at);
    }
  }
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int vector = first + i * 32;
    if (vector >= of_row) continue;
    const float scale = scale_of(weight, scales + static_cast<uint32_t>(vector) / vectors_of_block);
    float values[kVector];
    values_of<kCoding>(words[i], values);
    constexpr int kWidth = kVectorBytes / sizeof(T);
#pragma unroll
    for (int part = 0; part < kVector; part += kWidth) {
      float scaled[kWidth];
#pragma unroll
      for (int j = 0; j < kWidth; ++j) scaled[j] = values[part + j] * scale;
      store<T, kWidth>(out + (row * of_row + vector) * kVector + part, scaled);
    }
  }
}

}  // namespace fused_mlp::stacks
