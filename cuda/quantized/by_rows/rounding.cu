#include "../../sm90/launch.cuh"
#include "rounding.cuh"

namespace fused_mlp {

cudaError_t launch_row_rounding(const RowRounding& rounding, cudaStream_t stream) {
  const auto launch = [&]<typename R>(R) {
    return sm90::launch_kernel(round_rows_kernel<R>, rounding, static_cast<int>(rounding.rows),
                               R::threads(rounding.columns), 0, 1, true, stream);
  };
  const auto launch_gated = [&]<bool kGated>() {
    using Short = RowsOfE4m3<4, kGated>;
    return rounding.columns <= Short::kMostColumns ? launch(Short()) : launch(RowsOfE4m3<8, kGated>());
  };
  return rounding.up.data != nullptr ? launch_gated.template operator()<true>()
                                     : launch_gated.template operator()<false>();
}

}  // namespace fused_mlp
