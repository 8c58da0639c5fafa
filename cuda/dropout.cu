#include <algorithm>

#include "dropout.h"
#include "vector.cuh"

namespace fused_mlp {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = 1 << 16;

// Four bytes of 0 or 1 as four bits: the factor brings each byte's bit to one of bits 24 to 27.
__device__ __forceinline__ uint32_t bits_of_bytes(uint32_t bytes) { return bytes * 0x01020408u >> 24 & 0xfu; }

// A thread makes one word.
template <bool Vectors>
__global__ void __launch_bounds__(kThreads)
    pack_mask_kernel(const uint8_t* kept, int64_t rows, int64_t cols, KeptBits bits) {
  const int64_t words = rows * bits.words_of_row;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < words; i += int64_t{gridDim.x} * kThreads) {
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
__global__ void __launch_bounds__(kThreads)
    mask_kernel(Matrix x, KeptBits bits, float scale, Matrix out, int64_t rows, int64_t cols) {
  const int64_t vectors = cols / Width, count = rows * vectors;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += int64_t{gridDim.x} * kThreads) {
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

unsigned blocks_for(int64_t threads) {
  return static_cast<unsigned>(std::clamp<int64_t>((threads + kThreads - 1) / kThreads, 1, kMostBlocks));
}

bool is_in_vectors(Matrix matrix, int64_t rows, int64_t width) {
  return reinterpret_cast<uintptr_t>(matrix.data) % kVectorBytes == 0 && (rows == 1 || matrix.row_stride % width == 0);
}

}  // namespace

cudaError_t launch_pack_mask(const uint8_t* kept, int64_t rows, int64_t cols, KeptBits bits, cudaStream_t stream) {
  const bool vectors = cols % 32 == 0 && reinterpret_cast<uintptr_t>(kept) % kVectorBytes == 0;
  const auto kernel = vectors ? pack_mask_kernel<true> : pack_mask_kernel<false>;
  kernel<<<blocks_for(rows * bits.words_of_row), kThreads, 0, stream>>>(kept, rows, cols, bits);
  return cudaGetLastError();
}

cudaError_t launch_mask(Matrix x, KeptBits bits, float scale, bool adds, Matrix out, int64_t rows, int64_t cols,
                        DType dtype, cudaStream_t stream) {
  return visit_dtype(dtype, [&](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    constexpr int kWidth = kVectorBytes / sizeof(T);
    const bool vectors = cols % kWidth == 0 && is_in_vectors(x, rows, kWidth) && is_in_vectors(out, rows, kWidth);
    const auto kernel = vectors ? (adds ? mask_kernel<T, kWidth, true> : mask_kernel<T, kWidth, false>)
                                : (adds ? mask_kernel<T, 1, true> : mask_kernel<T, 1, false>);
    const int64_t width = vectors ? kWidth : 1;
    kernel<<<blocks_for(rows * (cols / width)), kThreads, 0, stream>>>(x, bits, scale, out, rows, cols);
    return cudaGetLastError();
  });
}

}  // namespace fused_mlp
