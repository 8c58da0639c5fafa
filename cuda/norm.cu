#include <algorithm>

#include "norm.cuh"

namespace fused_mlp {
namespace {

// The least power of two of threads, of at least a warp, that has a part of so many items each; not above the most.
unsigned threads_for(int64_t items, int64_t each, unsigned most) {
  unsigned threads = 32;
  while (threads < most && threads * each < items) threads *= 2;
  return threads;
}

template <typename T, int Width>
void launch_sum(const NormRows& rows, cudaStream_t stream) {
  const unsigned threads = threads_for(rows.cols, Width, kSumThreads);
  const dim3 block(threads, kSumThreads / threads);
  const int64_t parts = ceil_div(rows.cols, threads * Width), blocks = ceil_div(rows.rows, block.y) * parts;
  sum_kernel<T, Width><<<static_cast<unsigned>(blocks), block, 0, stream>>>(rows, static_cast<unsigned>(parts));
}

template <typename T, int Width, Residual Place>
void launch_norm(const NormRows& rows, cudaStream_t stream) {
  const unsigned threads = threads_for(rows.cols, kNormVectors * Width, kNormThreads);
  const dim3 block(threads, threads == 32 ? 4 : 1);
  const int64_t blocks = ceil_div(rows.rows, block.y);
  const auto kernel = rows.norm.centred() ? norm_kernel<T, Width, true, Place> : norm_kernel<T, Width, false, Place>;
  kernel<<<static_cast<unsigned>(blocks), block, 0, stream>>>(rows);
}

template <typename T, int Width>
cudaError_t launch(const NormRows& rows, cudaStream_t stream) {
  if (!rows.norm.normed()) {
    launch_sum<T, Width>(rows, stream);
  } else if (rows.norm.residual == Residual::kNone) {
    launch_norm<T, Width, Residual::kNone>(rows, stream);
  } else if (rows.norm.residual == Residual::kNormed) {
    launch_norm<T, Width, Residual::kNormed>(rows, stream);
  } else {
    launch_norm<T, Width, Residual::kAdded>(rows, stream);
  }
  return cudaGetLastError();
}

template <typename T>
cudaError_t run(const NormRows& rows, cudaStream_t stream) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  const auto aligned = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % kVectorBytes == 0; };
  const auto fits = [&](const Matrix& m) { return aligned(m.data) && (rows.rows == 1 || m.row_stride % kWidth == 0); };
  const bool vectors = rows.cols % kWidth == 0 && fits(rows.x) && fits(rows.residual) && fits(rows.out) &&
                       aligned(rows.norm.weight) && aligned(rows.norm.bias);
  return vectors ? launch<T, kWidth>(rows, stream) : launch<T, 1>(rows, stream);
}

}  // namespace

cudaError_t launch_norm(const NormRows& rows, cudaStream_t stream) {
  if (rows.rows == 0 || rows.cols == 0) return cudaSuccess;
  return visit_dtype(rows.dtype,
                     [&](auto* element) { return run<std::remove_pointer_t<decltype(element)>>(rows, stream); });
}

}  // namespace fused_mlp
