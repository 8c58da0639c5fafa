#include <algorithm>

#include "norm.cuh"

namespace fused_mlp {
namespace {

template <typename T, int Width>
cudaError_t launch(const Norm& norm, cudaStream_t stream) {
  unsigned threads = 32;  // with more than one vector each, up to the most that a block has
  while (threads < kNormThreads && int64_t{threads} * kNormVectors * Width < norm.cols) threads *= 2;
  const dim3 block(threads, threads == 32 ? 4 : 1);
  const int64_t blocks = ceil_div(norm.rows, block.y);
  const bool adds = norm.residual.data != nullptr;
  const auto rms = adds ? norm_kernel<T, Width, false, true> : norm_kernel<T, Width, false, false>;
  const auto layer = adds ? norm_kernel<T, Width, true, true> : norm_kernel<T, Width, true, false>;
  const auto kernel = norm.centred ? layer : rms;
  kernel<<<static_cast<unsigned>(blocks), block, 0, stream>>>(norm);
  return cudaGetLastError();
}

template <typename T>
cudaError_t run(const Norm& norm, cudaStream_t stream) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  const auto aligned = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % kVectorBytes == 0; };
  const auto fits = [&](const Matrix& m) { return aligned(m.data) && (norm.rows == 1 || m.row_stride % kWidth == 0); };
  const bool vectors = norm.cols % kWidth == 0 && fits(norm.x) && fits(norm.residual) && fits(norm.out) &&
                       aligned(norm.weight) && aligned(norm.bias);
  return vectors ? launch<T, kWidth>(norm, stream) : launch<T, 1>(norm, stream);
}

}  // namespace

cudaError_t launch_norm(const Norm& norm, cudaStream_t stream) {
  if (norm.rows == 0 || norm.cols == 0) return cudaSuccess;
  return visit_dtype(norm.dtype,
                     [&](auto* element) { return run<std::remove_pointer_t<decltype(element)>>(norm, stream); });
}

}  // namespace fused_mlp
