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

template <typename In>
bool are_vectors(const Matrix& x, int64_t rows, int64_t cols) {
  constexpr int kWidth = kVectorBytes / sizeof(In);
  return reinterpret_cast<uintptr_t>(x.data) % kVectorBytes == 0 && cols % kWidth == 0 &&
         (rows == 1 || x.row_stride % kWidth == 0);
}

template <typename In, typename Sums>
cudaError_t run(Matrix x, int64_t rows, int64_t cols, const Sums& out, int64_t parts, cudaStream_t stream) {
  constexpr int kWidth = kVectorBytes / sizeof(In);
  return are_vectors<In>(x, rows, cols) ? launch<In, kWidth>(x, rows, cols, out, parts, stream)
                                        : launch<In, 1>(x, rows, cols, out, parts, stream);
}

template <typename In>
cudaError_t run_joint(const SumSources& sources, int64_t rows, cudaStream_t stream) {
  constexpr int kWidth = kVectorBytes / sizeof(In);
  unsigned blocks = 0;
  bool vectors = true;
  for (const auto& [x, cols, out] : sources.of) {
    if (cols == 0) continue;
    blocks += static_cast<unsigned>(ceil_div(cols, kSumColumns));
    vectors = vectors && are_vectors<In>(x, rows, cols);
  }
  if (blocks == 0) return cudaSuccess;
  const auto kernel = vectors ? joint_sums_kernel<In, kWidth> : joint_sums_kernel<In, 1>;
  kernel<<<blocks, kColumnSumThreads, 0, stream>>>(sources, rows);
  return cudaGetLastError();
}

}  // namespace

int64_t parts_of_column_sums(int64_t rows, int64_t cols, int multiprocessors) {
  constexpr int64_t kLeastRows = 1024;  // rows of a part: with fewer, the second kernel costs more than is gained
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

cudaError_t launch_joint_sums(const SumSources& sources, int64_t rows, DType dtype, cudaStream_t stream) {
  return visit_dtype(dtype,
                     [&](auto* in) { return run_joint<std::remove_pointer_t<decltype(in)>>(sources, rows, stream); });
}

cudaError_t launch_grouped_sums(float* x, int64_t rows, int64_t cols, int64_t groups, const SumTargets& targets,
                                cudaStream_t stream) {
  if (cols == 0) return cudaSuccess;
  const int64_t all = groups * cols;
  return run<float>({x, all}, rows, all, GroupedSums{targets, cols}, 1, stream);
}

}  // namespace fused_mlp
