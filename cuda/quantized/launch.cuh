// Launches a streamed kernel. Instantiated once per dtype.
#pragma once

#include <algorithm>

#include "../gemm/shared_memory.cuh"
#include "choice.h"
#include "streamed_gemm.cuh"

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
  constexpr int kStatic = PairTable<typename Gemm::Element>::kStaticBytes;
  const cudaError_t error = allow_shared_memory<coded_gemm_kernel<Gemm>>(gpu.shared_of_cta - kStatic);
  if (error != cudaSuccess) return error;
  const int clusters = std::min(args.tiles, gpu.multiprocessors * kKernel.ctas / split);
  const int ctas = clusters * split;
  const bool early = p.starts_early && gpu.major >= 9;
  // CTAs that start while the kernel before drains take all of their share of a multiprocessor's shared memory:
  // otherwise the first multiprocessors to have room would get several, and others none.
  const int share = shared_of_each(ctas, gpu) - kStatic;
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config = {};
  config.gridDim = static_cast<unsigned>(ctas);
  config.blockDim = kKernel.threads();
  config.dynamicSmemBytes = early ? std::max(kKernel.shared_bytes(), share) : kKernel.shared_bytes();
  config.stream = stream;
  config.attrs = attributes;
  if (early) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (split > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs++].val.clusterDim = {static_cast<unsigned>(split), 1, 1};
  }
  return cudaLaunchKernelEx(&config, coded_gemm_kernel<Gemm>, args);
}

template <typename Element>
cudaError_t launch_coded_of(const CodedProblem& p, const CodedPlan& plan, const Gpu& gpu, cudaStream_t stream) {
#define FUSED_MLP_CODED(GATED, ...)                                                               \
  if (constexpr CodedKernel kKernel{__VA_ARGS__}; plan.kernel == kKernel && p.gated() == GATED) { \
    return launch_coded_gemm<CodedGemm<Element, GATED, kKernel>>(p, plan.split, gpu, stream);     \
  }
#include "kernels.def"
#undef FUSED_MLP_CODED
  return cudaErrorInvalidValue;
}

}  // namespace fused_mlp
