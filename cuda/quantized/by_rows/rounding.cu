#include <algorithm>

#include "../../sm90/launch.cuh"
#include "rounding.cuh"

namespace fused_mlp {

cudaError_t launch_row_rounding(const RowRounding& rounding, cudaStream_t stream) {
  using R = RowsOfE4m3;
  const int64_t usual = ceil_div(rounding.columns, int64_t{R::kValues} * R::kUsualVectors);
  const int threads = std::clamp(static_cast<int>(ceil_div(usual, int64_t{32}) * 32), 64, R::kMostThreads);
  return sm90::launch_kernel(round_rows_kernel, rounding, static_cast<int>(rounding.rows), threads, 0, 1, false,
                             stream);
}

}  // namespace fused_mlp
