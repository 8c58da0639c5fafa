#include <algorithm>

#include "copy_rows.cuh"

namespace fused_mlp {

cudaError_t launch_copy_rows(const RowsCopy& copy, cudaStream_t stream) {
  if (copy.rows == 0 || copy.columns == 0) return cudaSuccess;
  constexpr int64_t kMostRows = 65535;
  const int64_t vectors = ceil_div(copy.columns, kCopyWidth) + 1;
  const dim3 grid(static_cast<unsigned>(ceil_div(vectors, kCopyThreads)),
                  static_cast<unsigned>(std::min(copy.rows, kMostRows)));
  copy_rows_kernel<<<grid, kCopyThreads, 0, stream>>>(copy);
  return cudaGetLastError();
}

}  // namespace fused_mlp
