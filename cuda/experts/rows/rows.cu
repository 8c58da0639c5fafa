// Launches the kernels before and after the experts' products, for any architecture.
#include <algorithm>

#include "../../gemm/experts.h"
#include "sorted_rows.cuh"
#include "stack_copies.cuh"
#include "weight_gradient.cuh"
#include "weighted_sum.cuh"

namespace fused_mlp {
namespace {

template <typename Args>
cudaError_t launch_kernel(void (*kernel)(Args), const Args& args, int64_t grid, int threads, bool starts_early,
                          cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = static_cast<unsigned>(grid);
  config.blockDim = static_cast<unsigned>(threads);
  config.stream = stream;
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  config.numAttrs = starts_early ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, args);
}

}  // namespace

cudaError_t launch_row_sort(const RowSort& sort, const Gpu& gpu, cudaStream_t stream) {
  RowSort args = sort;
  const int slots = sort.routes.slots();
  args.part = static_cast<int>(std::min<int64_t>(ceil_div(slots, gpu.multiprocessors * 32) * 32, kSortSlots));
  const int64_t parts = ceil_div(slots, args.part);
  return launch_kernel(sorted_rows_kernel, args, std::min<int64_t>(parts, gpu.multiprocessors), kSortThreads, false,
                       stream);
}

cudaError_t launch_stack_copies(const StackCopies& copies, cudaStream_t stream) {
  int64_t boxes = 0;
  for (int i = 0; i < copies.count; ++i) {
    const int* sizes = copies.copies[i].sizes;
    boxes = std::max(boxes, ceil_div(sizes[0], kCopyBox) * ceil_div(sizes[1], kCopyBox) * ceil_div(sizes[2], kCopyBox));
  }
  constexpr int64_t kMostCtas = 1 << 16;
  if (boxes == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(std::min(boxes, kMostCtas)), static_cast<unsigned>(copies.count));
  stack_copies_kernel<<<grid, kCopyThreads, 0, stream>>>(copies);
  return cudaGetLastError();
}

cudaError_t launch_sum(const WeightedSum& sum, const Gpu& gpu, cudaStream_t stream) {
  const int64_t ctas = ceil_div(int64_t{sum.routes.tokens} * sum_warps(sum.n), kSumThreads / 32);
  auto* kernel = sum.dtype == DType::kFloat16 ? weighted_sum_kernel<__half> : weighted_sum_kernel<__nv_bfloat16>;
  return launch_kernel(kernel, sum, ctas, kSumThreads, starts_kernels_early(gpu), stream);
}

cudaError_t launch_weight_gradient(const WeightGradient& gradient, const Gpu& gpu, cudaStream_t stream) {
  const int64_t ctas = ceil_div(gradient.routes.slots(), kWeightGradientThreads / 32);
  return launch_kernel(weight_gradient_kernel, gradient, ctas, kWeightGradientThreads, false, stream);
}

}  // namespace fused_mlp
