#include <algorithm>
#include <iterator>

#include "../launch.cuh"

namespace fused_mlp::sm80 {

// Machine code runs on GPUs of its major version, from its minor version. A toolkit that does not know 12.0 generates
// none for it.
bool compiled_for(int major, int minor) {
  constexpr int kCompiled[] = {__CUDA_ARCH_LIST__};
  return std::any_of(std::begin(kCompiled), std::end(kCompiled),
                     [&](int each) { return each / 100 == major && each / 10 % 10 <= minor; });
}

template cudaError_t launch<__nv_bfloat16, false>(const GemmProblem&, const GemmKernel&, const Gpu&, cudaStream_t);

}  // namespace fused_mlp::sm80
