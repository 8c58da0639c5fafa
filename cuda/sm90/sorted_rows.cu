#include <algorithm>

#include "../gemm/experts.h"
#include "launch.cuh"
#include "sorted_rows.cuh"
#include "weight_gradient.cuh"

namespace fused_mlp::sm90 {

cudaError_t launch_row_sort(const RowSort& sort, int multiprocessors, cudaStream_t stream) {
  RowSort args = sort;
  const int slots = sort.routes.slots();
  args.part = std::min<int>(ceil_div(slots, multiprocessors * 32) * 32, kSortSlots);
  const int parts = ceil_div(slots, args.part);
  return launch_kernel(sorted_rows_kernel, args, std::min(parts, multiprocessors), kSortThreads, 0, 1, false, stream);
}

cudaError_t launch_weight_gradient(const WeightGradient& gradient, cudaStream_t stream) {
  return launch_kernel(weight_gradient_kernel, gradient, ceil_div(gradient.routes.slots(), kWeightGradientThreads / 32),
                       kWeightGradientThreads, 0, 1, false, stream);
}

}  // namespace fused_mlp::sm90
