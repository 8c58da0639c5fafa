#include <algorithm>

#include "dropout.cuh"

namespace fused_mlp {
namespace {

constexpr int64_t kMostBlocks = 1 << 16;

unsigned blocks_for(int64_t threads) {
  return static_cast<unsigned>(std::clamp<int64_t>((threads + kMaskThreads - 1) / kMaskThreads, 1, kMostBlocks));
}

bool is_in_vectors(Matrix matrix, int64_t rows, int64_t width) {
  return reinterpret_cast<uintptr_t>(matrix.data) % kVectorBytes == 0 && (rows == 1 || matrix.row_stride % width == 0);
}

}  // namespace

cudaError_t launch_pack_mask(const uint8_t* kept, int64_t rows, int64_t cols, KeptBits bits, cudaStream_t stream) {
  const bool vectors = cols % 32 == 0 && reinterpret_cast<uintptr_t>(kept) % kVectorBytes == 0;
  const auto kernel = vectors ? pack_mask_kernel<true> : pack_mask_kernel<false>;
  kernel<<<blocks_for(rows * bits.words_of_row), kMaskThreads, 0, stream>>>(kept, rows, cols, bits);
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
    kernel<<<blocks_for(rows * (cols / width)), kMaskThreads, 0, stream>>>(x, bits, scale, out, rows, cols);
    return cudaGetLastError();
  });
}

}  // namespace fused_mlp
