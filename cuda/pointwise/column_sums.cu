#include <algorithm>

#include "column_sums.cuh"

namespace fused_mlp {
namespace {

template <typename In, int Width, typename Sums>
cudaError_t launch(Matrix x, int64_t rows, int64_t cols, const Sums& out, int64_t parts, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(ceil_div(cols, kSumColumns)), static_cast<unsigned>(parts));
  column_sums_kernel<In, Sums, Width>
      <<<grid, kColumnSumThreads, 0, stream>>>(x, rows, cols, ceil_div(rows, parts), out);
  return cudaGetLastError();
}

template <typename In, typename Sums>
cudaError_t run(Matrix x, int64_t rows, int64_t cols, const Sums& out, int64_t parts, cudaStream_t stream) {
  constexpr int kWidth = kVectorBytes / sizeof(In);
  const bool vectors = reinterpret_cast<uintptr_t>(x.data) % kVectorBytes == 0 && cols % kWidth == 0 &&
                       (rows == 1 || x.row_stride % kWidth == 0);
  return vectors ? launch<In, kWidth>(x, rows, cols, out, parts, stream)
                 : launch<In, 1>(x, rows, cols, out, parts, stream);
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
      const AdjacentSums<Out> sums{static_cast<Out*>(out), cols};
      if (parts == 1) return run<In>(x, rows, cols, sums, 1, stream);
      const cudaError_t error = run<In>(x, rows, cols, AdjacentSums<float>{partial, cols}, parts, stream);
      if (error != cudaSuccess) return error;
      return run<float>({partial, cols}, parts, cols, sums, 1, stream);
    });
  });
}

cudaError_t launch_grouped_sums(float* x, int64_t rows, int64_t cols, int64_t groups, const SumTargets& targets,
                                cudaStream_t stream) {
  if (cols == 0) return cudaSuccess;
  const int64_t all = groups * cols;
  return run<float>({x, all}, rows, all, GroupedSums{targets, cols}, 1, stream);
}

}  // namespace fused_mlp
