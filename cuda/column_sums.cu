#include <algorithm>

#include "column_sums.cuh"

namespace fused_mlp {
namespace {

template <typename In, typename Out, int Width>
cudaError_t launch(Matrix x, int64_t rows, int64_t cols, Out* out, int64_t parts, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(ceil_div(cols, kSumColumns)), static_cast<unsigned>(parts));
  column_sums_kernel<In, Out, Width><<<grid, kColumnSumThreads, 0, stream>>>(x, rows, cols, ceil_div(rows, parts), out);
  return cudaGetLastError();
}

template <typename In, typename Out>
cudaError_t run(Matrix x, int64_t rows, int64_t cols, Out* out, int64_t parts, cudaStream_t stream) {
  constexpr int kWidth = kVectorBytes / sizeof(In);
  const bool vectors = reinterpret_cast<uintptr_t>(x.data) % kVectorBytes == 0 && cols % kWidth == 0 &&
                       (rows == 1 || x.row_stride % kWidth == 0);
  return vectors ? launch<In, Out, kWidth>(x, rows, cols, out, parts, stream)
                 : launch<In, Out, 1>(x, rows, cols, out, parts, stream);
}

}  // namespace

int64_t parts_of_column_sums(int64_t rows, int64_t cols, int multiprocessors) {
  constexpr int64_t kLeastRows = 1024;  // rows of a part: with fewer, the second kernel takes longer than is gained
  const int64_t blocks = std::max<int64_t>(ceil_div(cols, kSumColumns), 1);
  return std::max<int64_t>(std::min(multiprocessors / blocks, rows / kLeastRows), 1);
}

cudaError_t launch_column_sums(Matrix x, int64_t rows, int64_t cols, DType dtype, void* out, DType out_dtype,
                               float* partial, int64_t parts, cudaStream_t stream) {
  if (cols == 0) return cudaSuccess;
  return visit_dtype(dtype, [&](auto* in) {
    using In = std::remove_pointer_t<decltype(in)>;
    return visit_dtype(out_dtype, [&](auto* element) {
      using Out = std::remove_pointer_t<decltype(element)>;
      if (parts == 1) return run<In>(x, rows, cols, static_cast<Out*>(out), 1, stream);
      const cudaError_t error = run<In>(x, rows, cols, partial, parts, stream);
      if (error != cudaSuccess) return error;
      return run<float>({partial, cols}, parts, cols, static_cast<Out*>(out), 1, stream);
    });
  });
}

}  // namespace fused_mlp
