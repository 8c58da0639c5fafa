#include <algorithm>

#include "launch.cuh"
#include "sorted_rows.cuh"

namespace fused_mlp::sm90 {

cudaError_t launch_row_sort(const RowSort& sort, int multiprocessors, cudaStream_t stream) {
  const int parts = ceil_div(sort.routes.slots(), kSortSlots);
  return launch_kernel(sorted_rows_kernel, sort, std::min(parts, multiprocessors), kSortThreads, 0, 1, false, stream);
}

}  // namespace fused_mlp::sm90
