#include <algorithm>

#include "norm.cuh"

namespace fused_mlp {
namespace {

using Kernel = void (*)(NormRows);

template <typename T, int Width, Residual Place>
Kernel kernel_of(const Norm& norm) {
  if (norm.centred()) return norm_kernel<T, Width, Statistic::kVariance, Place>;
  if (norm.normed()) return norm_kernel<T, Width, Statistic::kMeanSquare, Place>;
  return Place == Residual::kAdded ? norm_kernel<T, Width, Statistic::kNone, Residual::kAdded> : nullptr;
}

template <typename T, int Width>
Kernel kernel_of(const Norm& norm) {
  if (norm.residual == Residual::kNone) return kernel_of<T, Width, Residual::kNone>(norm);
  return norm.residual == Residual::kNormed ? kernel_of<T, Width, Residual::kNormed>(norm)
                                            : kernel_of<T, Width, Residual::kAdded>(norm);
}

template <typename T, int Width>
cudaError_t launch(const NormRows& rows, cudaStream_t stream) {
  unsigned threads = 32;  // with more than one vector each, up to the most that a block has
  while (threads < kNormThreads && int64_t{threads} * kNormVectors * Width < rows.cols) threads *= 2;
  const dim3 block(threads, threads == 32 ? 4 : 1);
  const int64_t blocks = ceil_div(rows.rows, block.y);
  kernel_of<T, Width>(rows.norm)<<<static_cast<unsigned>(blocks), block, 0, stream>>>(rows);
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
