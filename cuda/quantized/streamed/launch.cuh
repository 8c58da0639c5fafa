// Launches a streamed kernel. Instantiated once per dtype.
#pragma once

#include <algorithm>

#include "../../gemm/shared_memory.cuh"
#include "../choice.h"
#include "gemm.cuh"

namespace fused_mlp {

template <typename Gemm>
cudaError_t launch_coded_gemm(const CodedProblem& p, int split, const Gpu& gpu, cudaStream_t stream) {
  constexpr CodedKernel kKernel = Gemm::kKernel;
  CodedGemmArgs args{p.a, p.weight, p.up_weight, p.out, p.epilogue};
  args.m = static_cast<int>(p.m);
  args.n = static_cast<int>(p.n);
  args.k = static_cast<int>(p.k);
  args.tiles_m = static_cast<int>(ceil_div(p.m, kKernel.tokens));
  args.tiles = static_cast<int>(args.tiles_m * ceil_div(p.n, Gemm::kColumns));
  args.split = split;
  const cudaError_t error = allow_shared_memory<coded_gemm_kernel<Gemm>>(kKernel.shared_bytes());
  if (error != cudaSuccess) return error;
  const int clusters = std::min(args.tiles, gpu.multiprocessors * kKernel.ctas / split);
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config = {};
  config.gridDim = static_cast<unsigned>(clusters * split);
  config.blockDim = kKernel.threads();
  config.dynamicSmemBytes = kKernel.shared_bytes();
  config.stream = stream;
  config.attrs = attributes;
  if (p.starts_early && gpu.major >= 9) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (split > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs++].val.clusterDim = {static_cast<unsigned>(split), 1, 1};
  }
  return cudaLaunchKernelEx(&config, coded_gemm_kernel<Gemm>, args);
}

// Int4 in tiles is decoded only to bfloat16.
template <typename Element>
constexpr bool has_kernel(Coding coding) {
  return coding != Coding::kInt4Tiles || std::is_same_v<Element, __nv_bfloat16>;
}

template <typename Element>
cudaError_t launch_coded_of(const CodedProblem& p, const CodedPlan& plan, const Gpu& gpu, cudaStream_t stream) {
#define FUSED_MLP_CODED(GATED, ...)                                                               \
  if (constexpr CodedKernel kKernel{__VA_ARGS__}; plan.kernel == kKernel && p.gated() == GATED) { \
    if constexpr (has_kernel<Element>(kKernel.coding)) {                                          \
      return launch_coded_gemm<CodedGemm<Element, GATED, kKernel>>(p, plan.split, gpu, stream);   \
    }                                                                                             \
  }
#include "kernels.def"
#undef FUSED_MLP_CODED
  return cudaErrorInvalidValue;
}

}  // namespace fused_mlp
