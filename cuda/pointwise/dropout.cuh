// The kernels for dropout masks.
#pragma once

#include "../vector.cuh"
#include "dropout.h"

namespace fused_mlp {

constexpr int kMaskThreads = 256;

// Packs four bytes of 0 or 1 into four bits: the factor moves each byte's bit to one of bits 24 to 27.
__device__ __forceinline__ uint32_t bits_of_bytes(uint32_t bytes) { return bytes * 0x01020408u >> 24 & 0xfu; }

// Each thread produces one word.
template <bool Vectors>
__global__ void __launch_bounds__(kMaskThreads)
    pack_mask_kernel(const uint8_t* kept, int64_t rows, int64_t cols, KeptBits bits) {
  const int64_t words = rows * bits.words_of_row;
  for (int64_t i = int64_t{blockIdx.x} * kMaskThreads + threadIdx.x; i < words;
       i += int64_t{gridDim.x} * kMaskThreads) {
    const int64_t row = i / bits.words_of_row, first = (i - row * bits.words_of_row) * 32;
    const uint8_t* const source = kept + row * cols + first;
    uint32_t word = 0;
    if constexpr (Vectors) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 bytes = reinterpret_cast<const uint4*>(source)[half];
        word |= (bits_of_bytes(bytes.x) | bits_of_bytes(bytes.y) << 4 | bits_of_bytes(bytes.z) << 8 |
                 bits_of_bytes(bytes.w) << 12)
                << 16 * half;
      }
    } else {
      const int count = static_cast<int>(min(cols - first, int64_t{32}));
      for (int bit = 0; bit < count; ++bit) word |= uint32_t{source[bit] != 0} << bit;
    }
    bits.words[i] = word;
  }
}

template <typename T, int Width, bool Adds>
__global__ void __launch_bounds__(kMaskThreads)
    mask_kernel(Matrix x, KeptBits bits, float scale, Matrix out, int64_t rows, int64_t cols) {
  const int64_t vectors = cols / Width, count = rows * vectors;
  for (int64_t i = int64_t{blockIdx.x} * kMaskThreads + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kMaskThreads) {
    const int64_t row = i / vectors, col = (i - row * vectors) * Width;
    const uint32_t word = bits.words[row * bits.words_of_row + col / 32] >> col % 32;
    T* const target = static_cast<T*>(out.data) + row * out.row_stride + col;
    const auto in =
        *reinterpret_cast<const Packed<T, Width>*>(static_cast<const T*>(x.data) + row * x.row_stride + col);
    Packed<T, Width> before;
    if constexpr (Adds) before = *reinterpret_cast<const Packed<T, Width>*>(target);
    float values[Width];
#pragma unroll
    for (int lane = 0; lane < Width; ++lane) {
      values[lane] = word >> lane & 1 ? in.lane(lane) * scale : 0.0f;
      if constexpr (Adds) values[lane] += before.lane(lane);
    }
    store(target, values);
  }
}

}  // namespace fused_mlp
