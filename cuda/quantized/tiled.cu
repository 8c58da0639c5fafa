// Launches the kernels of 4-bit weights for Hopper.
#include <algorithm>

#include "../gemm/shared_memory.cuh"
#include "../sm90/launch.cuh"
#include "choice.h"
#include "streamed_sm90.cuh"
#include "tiled_gemm.cuh"

namespace fused_mlp {
namespace {

// Packed rows, as elements of 16 bits.
Matrix words_of(const CodedWeight& weight, int64_t k) { return {const_cast<uint8_t*>(weight.data), k / 4}; }

template <typename Gemm>
cudaError_t launch_gemm(const CodedProblem& p, int split, cudaStream_t stream) {
  CodedTiledArgs args{};
  args.scales = p.weight.scales;
  args.up_scales = p.up_weight.scales;
  args.code = p.weight.code;
  args.out = p.out;
  args.epilogue = p.epilogue;
  args.m = static_cast<int>(p.m);
  args.n = static_cast<int>(p.n);
  args.k = static_cast<int>(p.k);
  args.tiles_m = static_cast<int>(ceil_div(p.m, Gemm::kTokens));
  args.split = split;
  args.loaded_tokens = static_cast<int>(std::min<int64_t>(p.m, Gemm::kTokens));
  const auto encode_weight = [&](CUtensorMap* map, const CodedWeight& weight) {
    return sm90::encode_tensor_map(map, p.dtype, words_of(weight, p.k), p.n, p.k / 4, Gemm::kBoxRows,
                                   Gemm::kRowBytes / 2);
  };
  const bool mapped = sm90::encode_tensor_map(&args.a, p.dtype, p.a, p.m, p.k, args.loaded_tokens, Gemm::kBlockK) &&
                      encode_weight(&args.weight, p.weight) &&
                      (!Gemm::kGated || encode_weight(&args.up_weight, p.up_weight));
  if (!mapped) return cudaErrorInvalidValue;
  const cudaError_t error = allow_shared_memory<coded_tiled_kernel<Gemm>>(Gemm::kSharedBytes);
  if (error != cudaSuccess) return error;
  const int64_t tiles = args.tiles_m * ceil_div(p.n, Gemm::kColumns);
  return sm90::launch_kernel(coded_tiled_kernel<Gemm>, args, static_cast<int>(tiles * split), Gemm::kThreads,
                             Gemm::kSharedBytes, split, p.starts_early, stream);
}

template <typename Gemm>
cudaError_t launch_stream(const CodedProblem& p, int split, int multiprocessors, cudaStream_t stream) {
  CodedStreamArgs args{};
  CodedGemmArgs& gemm = args.gemm = {p.a, p.weight, p.up_weight, p.out, p.epilogue};
  gemm.m = static_cast<int>(p.m);
  gemm.n = static_cast<int>(p.n);
  gemm.k = static_cast<int>(p.k);
  gemm.tiles_m = static_cast<int>(ceil_div(p.m, Gemm::kTokens));
  gemm.tiles = static_cast<int>(gemm.tiles_m * ceil_div(p.n, Gemm::kColumns));
  gemm.split = split;
  args.loaded_tokens = static_cast<int>(std::min<int64_t>(p.m, Gemm::kTokens));
  const auto encode = [&](CUtensorMap* map, CUtensorMap* scales, const CodedWeight& weight) {
    const int64_t words = p.k / kCodedBlock * 2;  // of a row's scales
    return sm90::encode_tensor_map(map, p.dtype, words_of(weight, p.k), p.n, p.k / 4, Gemm::kBoxRows,
                                   Gemm::kBoxBytes / 2) &&
           sm90::encode_tensor_map(scales, p.dtype, {const_cast<float*>(weight.scales), words}, p.n, words,
                                   Gemm::kBoxRows, Gemm::kScaleBytes / 2);
  };
  const bool mapped = sm90::encode_tensor_map(&args.a, p.dtype, p.a, p.m, p.k, args.loaded_tokens, kCodedBlock) &&
                      encode(&args.weight, &args.scales, p.weight) &&
                      (!Gemm::kGated || encode(&args.up_weight, &args.up_scales, p.up_weight));
  if (!mapped) return cudaErrorInvalidValue;
  const cudaError_t error = allow_shared_memory<coded_stream_kernel<Gemm>>(Gemm::kSharedBytes);
  if (error != cudaSuccess) return error;
  const int clusters = std::min(gemm.tiles, multiprocessors * Gemm::kKernel.ctas / split);
  return sm90::launch_kernel(coded_stream_kernel<Gemm>, args, clusters * split, Gemm::kThreads + 32,
                             Gemm::kSharedBytes, split, p.starts_early, stream);
}

template <typename Element, bool kGated>
cudaError_t launch_of(const CodedProblem& p, const CodedPlan& plan, cudaStream_t stream) {
  switch (plan.tokens) {
    case 32:
      return launch_gemm<CodedTiled<Element, kGated, 32>>(p, plan.split, stream);
    case 64:
      return launch_gemm<CodedTiled<Element, kGated, 64>>(p, plan.split, stream);
    case 128:
      return launch_gemm<CodedTiled<Element, kGated, 128>>(p, plan.split, stream);
    case 192:
      return launch_gemm<CodedTiled<Element, kGated, 192>>(p, plan.split, stream);
    case 256:
      return launch_gemm<CodedTiled<Element, kGated, 256>>(p, plan.split, stream);
  }
  return cudaErrorInvalidValue;
}

template <typename Element>
cudaError_t launch(const CodedProblem& p, const CodedPlan& plan, cudaStream_t stream) {
  return p.gated() ? launch_of<Element, true>(p, plan, stream) : launch_of<Element, false>(p, plan, stream);
}

}  // namespace

cudaError_t launch_coded_tiled(const CodedProblem& p, const CodedPlan& plan, cudaStream_t stream) {
  return p.dtype == DType::kFloat16 ? launch<__half>(p, plan, stream) : launch<__nv_bfloat16>(p, plan, stream);
}

}  // namespace fused_mlp
