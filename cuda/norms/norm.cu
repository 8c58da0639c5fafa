#include <algorithm>

#include "norm.cuh"

namespace fused_mlp {
namespace {

// The least power of two of threads, at least a warp, with which each thread has at most `each` items; capped at the
// maximum.
unsigned threads_for(int64_t items, int64_t each, unsigned most) {
  unsigned threads = 32;
  while (threads < most && threads * each < items) threads *= 2;
  return threads;
}

// CTAs that start early are packed where the previous kernel leaves room for them. If there are more of them than
// multiprocessors, that takes longer than a start after it (measured on an H100).
constexpr int64_t kMostEarly = 132;

template <typename... Args>
cudaError_t launch_kernel(void (*kernel)(Args...), int64_t blocks, dim3 block, bool overlaps, cudaStream_t stream,
                          Args... args) {
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = static_cast<unsigned>(blocks);
  config.blockDim = block;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = overlaps && blocks <= kMostEarly ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

template <typename T, int Width>
cudaError_t launch_sum(const NormRows& rows, cudaStream_t stream) {
  const unsigned threads = threads_for(rows.cols, Width, kSumThreads);
  const dim3 block(threads, kSumThreads / threads);
  const int64_t parts = ceil_div(rows.cols, threads * Width), blocks = ceil_div(rows.rows, block.y) * parts;
  return launch_kernel(sum_kernel<T, Width>, blocks, block, rows.overlaps, stream, rows, static_cast<unsigned>(parts));
}

template <typename T, int Width, Residual Place>
cudaError_t launch_norm(const NormRows& rows, cudaStream_t stream) {
  const unsigned threads = threads_for(rows.cols, kNormVectors * Width, kNormThreads);
  const dim3 block(threads, threads == 32 ? 4 : 1);
  const int64_t blocks = ceil_div(rows.rows, block.y);
  const auto kernel = rows.norm.centred() ? norm_kernel<T, Width, true, Place> : norm_kernel<T, Width, false, Place>;
  return launch_kernel(kernel, blocks, block, rows.overlaps, stream, rows);
}

template <typename T, int Width>
cudaError_t launch(const NormRows& rows, cudaStream_t stream) {
  if (!rows.norm.normed()) return launch_sum<T, Width>(rows, stream);
  switch (rows.norm.residual) {
    case Residual::kNone:
      return launch_norm<T, Width, Residual::kNone>(rows, stream);
    case Residual::kNormed:
      return launch_norm<T, Width, Residual::kNormed>(rows, stream);
    case Residual::kAdded:
      return launch_norm<T, Width, Residual::kAdded>(rows, stream);
  }
  return cudaErrorInvalidValue;
}

template <typename T>
cudaError_t run(const NormRows& rows, cudaStream_t stream) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  const auto aligned = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % kVectorBytes == 0; };
  const auto fits = [&](const Matrix& m) { return aligned(m.data) && (rows.rows == 1 || m.row_stride % kWidth == 0); };
  const auto all_fit = [&](const Features& f) { return aligned(f.data) && f.stride % kWidth == 0; };
  const bool vectors = rows.cols % kWidth == 0 && fits(rows.x) && fits(rows.residual) && fits(rows.out) &&
                       all_fit(rows.norm.weight) && all_fit(rows.norm.bias);
  return vectors ? launch<T, kWidth>(rows, stream) : launch<T, 1>(rows, stream);
}

}  // namespace

cudaError_t launch_norm(const NormRows& rows, cudaStream_t stream) {
  if (rows.rows == 0 || rows.cols == 0) return cudaSuccess;
  return visit_dtype(rows.dtype,
                     [&](auto* element) { return run<std::remove_pointer_t<decltype(element)>>(rows, stream); });
}

}  // namespace fused_mlp
