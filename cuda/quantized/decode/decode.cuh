// The kernels that decode weights and nested scales.
#pragma once

#include <cuda_fp8.h>

#include "../../vector.cuh"
#include "decode.h"
#include "integers.cuh"

namespace fused_mlp::decoding {
constexpr int kThreads = 256;
constexpr int kCodes = 8;    // per vector of a thread: four bytes of codes, 16 bytes of 16-bit results
constexpr int kVectors = 4;  // per thread

// Rounds like bitsandbytes, and never uses a fused multiply-add.
template <bool kNested>
__device__ __forceinline__ float scale_of(const CodedScales& scales, int64_t block) {
  if constexpr (kNested) {
    const float of_code = __ldg(scales.nested_code + __ldg(static_cast<const uint8_t*>(scales.scales) + block));
    return __fadd_rn(__fmul_rn(of_code, __ldg(scales.nested_scales + block / scales.nested_block)), scales.offset);
  } else {
    return __ldg(static_cast<const float*>(scales.scales) + block);
  }
}

// The code table, one copy per lane of a warp, so that there are no bank conflicts.
struct CodeTable {
  float (&values)[16][32];
  __device__ __forceinline__ void fill(const float* code) {
    for (int i = threadIdx.x; i < 16 * 32; i += kThreads) values[i / 32][i % 32] = __ldg(code + i / 32);
    __syncthreads();
  }
  __device__ __forceinline__ float operator()(uint32_t code) const { return values[code & 15][threadIdx.x % 32]; }
};

template <typename T, bool kNested>
__device__ __forceinline__ void decode_one(const CodedElements& weight, const CodeTable& table, int64_t i, T* out) {
  const uint32_t code = weight.data[i / 2] >> (i % 2 == 0 ? 4 : 0);
  out[i] = from_float<T>(table(code) * scale_of<kNested>(weight.scales, i / weight.block));
}

// Codes are read, and results written, in vectors, each of which lies within a block of 1 << shift elements.
template <typename T, bool kNested>
__global__ void __launch_bounds__(kThreads) decode_vectors_kernel(CodedElements weight, int shift, T* out) {
  __shared__ float values[16][32];
  CodeTable table{values};
  table.fill(weight.code);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads * kVectors + threadIdx.x;
  const int64_t vectors = weight.elements / kCodes;
  uint32_t codes[kVectors];
  float scales[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int64_t vector = first + i * kThreads;
    if (vector >= vectors) continue;
    codes[i] = __ldg(reinterpret_cast<const uint32_t*>(weight.data) + vector);
    scales[i] = scale_of<kNested>(weight.scales, vector * kCodes >> shift);
  }
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int64_t vector = first + i * kThreads;
    if (vector >= vectors) continue;
    constexpr int kWidth = kVectorBytes / sizeof(T);
#pragma unroll
    for (int part = 0; part < kCodes; part += kWidth) {
      float elements[kWidth];
#pragma unroll
      for (int j = 0; j < kWidth; ++j) elements[j] = table(codes[i] >> ((part + j) ^ 1) * 4) * scales[i];
      store<T, kWidth>(out + vector * kCodes + part, elements);
    }
  }
  const int64_t left = vectors * kCodes + threadIdx.x;
  if (blockIdx.x == 0 && left < weight.elements) decode_one<T, kNested>(weight, table, left, out);
}

template <typename T, bool kNested>
__global__ void __launch_bounds__(kThreads) decode_kernel(CodedElements weight, T* out) {
  __shared__ float values[16][32];
  CodeTable table{values};
  table.fill(weight.code);
  constexpr int kOfCta = kThreads * kVectors * kCodes;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kOfCta, end = min(weight.elements, begin + kOfCta);
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) decode_one<T, kNested>(weight, table, i, out);
}

constexpr int vector_bytes(Coding coding) { return kCodes * block_bytes(coding) / kCodedBlock; }

// The value of the lowest bits. For int4 the zero point is not subtracted yet.
template <Coding kCoding>
__device__ __forceinline__ float value_of(uint32_t bits, uint32_t zero) {
  if constexpr (kCoding == Coding::kInt4)
    return static_cast<float>(static_cast<int>(bits & 15) - static_cast<int>(zero));
  if constexpr (kCoding == Coding::kInt8) return static_cast<float>(static_cast<int8_t>(bits));
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(static_cast<uint8_t>(bits), __NV_E4M3)));
}

// Vectors of 8 values, each within a row and a block. A warp processes kVectors vectors per lane of one row, so it
// divides only once.
constexpr int kRows = kThreads / 32, kRowVectors = 32 * kVectors;  // per CTA, per warp

template <typename T, Coding kCoding>
__global__ void __launch_bounds__(kThreads) decode_blocked_vectors_kernel(BlockedElements weight, T* out) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / 32;
  if (row >= weight.n) return;
  const int first = blockIdx.y * kRowVectors + threadIdx.x % 32, of_row = static_cast<int>(weight.k / kCodes);
  const auto vectors_of_block = static_cast<uint32_t>(min(weight.block, weight.k) / kCodes);
  const float* const scales = weight.scales + row / weight.block_rows * ceil_div(weight.k, weight.block);
  constexpr int kWords = vector_bytes(kCoding) / 4, kOfWord = kCodes / kWords;
  const auto* const data = reinterpret_cast<const uint32_t*>(weight.data) + row * of_row * kWords;
  uint32_t words[kVectors][kWords];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int vector = first + i * 32;
    if (vector >= of_row) continue;
#pragma unroll
    for (int j = 0; j < kWords; ++j) words[i][j] = __ldg(data + vector * kWords + j);
  }
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int vector = first + i * 32;
    if (vector >= of_row) continue;
    float scale = __ldg(scales + static_cast<uint32_t>(vector) / vectors_of_block);
    const uint32_t zero = kCoding == Coding::kInt4 ? take_zero(scale) : 0;
    scale *= weight.factor;
    constexpr int kWidth = kVectorBytes / sizeof(T);
#pragma unroll
    for (int part = 0; part < kCodes; part += kWidth) {
      float elements[kWidth];
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const int code = part + j;
        elements[j] = value_of<kCoding>(words[i][code / kOfWord] >> code % kOfWord * (32 / kOfWord), zero) * scale;
      }
      store<T, kWidth>(out + (row * of_row + vector) * kCodes + part, elements);
    }
  }
}

template <typename T, Coding kCoding>
__global__ void __launch_bounds__(kThreads) decode_blocked_kernel(BlockedElements weight, T* out) {
  constexpr int kOfCta = kThreads * kVectors * kCodes;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kOfCta, end = min(weight.n * weight.k, begin + kOfCta);
  const int64_t blocks = ceil_div(weight.k, weight.block);
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
    float scale = __ldg(weight.scales + i / weight.k / weight.block_rows * blocks + i % weight.k / weight.block);
    const uint32_t zero = kCoding == Coding::kInt4 ? take_zero(scale) : 0;
    constexpr bool kHalves = kCoding == Coding::kInt4;
    const uint32_t bits = weight.data[kHalves ? i / 2 : i] >> (kHalves ? i % 2 * 4 : 0);
    out[i] = from_float<T>(value_of<kCoding>(bits, zero) * (scale * weight.factor));
  }
}

// A warp decodes a tile with four lanes per row. Each lane owns eight adjacent columns of every 32, so that the four
// write 64 bytes at once. Each reads the words of all four lanes, which come from L1 except one.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    decode_tiles_kernel(const uint32_t* words, const uint32_t* scales, int64_t n, int64_t k, unsigned of_row, int block,
                        T* out) {
  const unsigned tile = blockIdx.y * kRows + threadIdx.x / 32;
  const int lane = threadIdx.x % 32, place = lane % 4;
  const int64_t rows = gridDim.x * int64_t{Tiles::kRows}, row = blockIdx.x * int64_t{Tiles::kRows} + lane / 4;
  if (tile >= of_row || row >= n) return;
  const uint32_t* const own =
      words + ((blockIdx.x * int64_t{of_row} + tile) * Tiles::kLanes + (lane & ~3)) * Tiles::kWords;
#pragma unroll 1
  for (int part = 0; part < Tiles::kWords; ++part) {
    const int column = static_cast<int>(tile) * Tiles::kColumns + part * 32 + place * 8;
    if (column >= k) return;
    uint32_t codes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) codes[i] = __ldg(own + i * Tiles::kWords + part);
    const uint32_t pair = __ldg(scales + column / block * rows + row);
    const float scale = __uint_as_float(pair << 16), zero = __uint_as_float(pair & 0xffff0000);
    float elements[kCodes];
#pragma unroll
    for (int i = 0; i < kCodes; ++i) {
      const uint32_t bits = codes[i / 2] >> (place * 4 + i % 2 * 16);
      elements[i] = __fmaf_rn(static_cast<float>(static_cast<int>(bits & 15) - 8), scale, zero);
    }
    T* const to = out + row * k + column;
    constexpr int kWidth = kVectorBytes / sizeof(T);
#pragma unroll
    for (int i = 0; i < kCodes; i += kWidth) {
      store<T, kWidth>(to + i, *reinterpret_cast<float (*)[kWidth]>(elements + i));
    }
  }
}

constexpr int kScales = 4;  // per thread

struct AllNested {
  NestedScales of[kMostNested];
};
__global__ void __launch_bounds__(kThreads) unnest_kernel(const __grid_constant__ AllNested all) {
  const NestedScales& nested = all.of[blockIdx.y];
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kScales;
  if (first >= nested.count) return;
  const CodedScales& scales = nested.scales;
  const auto* const codes = static_cast<const uint8_t*>(scales.scales) + first;
  const bool whole = first + kScales <= nested.count && scales.nested_block % kScales == 0 &&
                     reinterpret_cast<uintptr_t>(codes) % kScales == 0;
  if (!whole) {
    for (int64_t i = first; i < min(nested.count, first + kScales); ++i) nested.out[i] = scale_of<true>(scales, i);
    return;
  }
  const uint32_t four = __ldg(reinterpret_cast<const uint32_t*>(codes));
  const float of_nested = __ldg(scales.nested_scales + first / scales.nested_block);
  float values[kScales];
#pragma unroll
  for (int i = 0; i < kScales; ++i) {
    const float of_code = __ldg(scales.nested_code + (four >> i * 8 & 255));
    values[i] = __fadd_rn(__fmul_rn(of_code, of_nested), scales.offset);
  }
  *reinterpret_cast<float4*>(nested.out + first) = make_float4(values[0], values[1], values[2], values[3]);
}

}  // namespace fused_mlp::decoding
