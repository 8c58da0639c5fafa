// Launches the tiled kernels.
#include <algorithm>

#include "../../gemm/shared_memory.cuh"
#include "../../sm90/launch.cuh"
#include "../choice.h"
#include "gemm.cuh"

namespace fused_mlp {
namespace {

// The size of a weight's row in 16-bit elements.
int64_t words(const CodedProblem& p) { return p.k / kCodedBlock * block_bytes(p.coding) / 2; }
Matrix words_of(const CodedWeight& weight, const CodedProblem& p) {
  return {const_cast<uint8_t*>(weight.data), words(p)};
}

template <typename Gemm>
cudaError_t launch_gemm(const CodedProblem& p, int split, const Gpu& gpu, cudaStream_t stream) {
  CodedTiledArgs args{};
  args.of_weight = p.weight;
  args.of_up_weight = p.up_weight;
  args.out = p.out;
  args.epilogue = p.epilogue;
  args.m = static_cast<int>(p.m);
  args.n = static_cast<int>(p.n);
  args.k = static_cast<int>(p.k);
  args.tiles_m = static_cast<int>(ceil_div(p.m, Gemm::kTokens));
  args.split = split;
  args.loaded_tokens = static_cast<int>(std::min<int64_t>(p.m, Gemm::kTokens));
  const auto encode_weight = [&](CUtensorMap* map, const CodedWeight& weight) {
    return sm90::encode_tensor_map(map, p.dtype, words_of(weight, p), p.n, words(p), Gemm::kBoxRows,
                                   Gemm::kRowBytes / 2);
  };
  const bool mapped = sm90::encode_tensor_map(&args.a, p.dtype, p.a, p.m, p.k, args.loaded_tokens, kCodedBlock) &&
                      encode_weight(&args.weight, p.weight) &&
                      (!Gemm::kGated || encode_weight(&args.up_weight, p.up_weight));
  if (!mapped) return cudaErrorInvalidValue;
  const cudaError_t error = allow_shared_memory<coded_tiled_kernel<Gemm>>(gpu.shared_of_cta);
  if (error != cudaSuccess) return error;
  const int ctas = static_cast<int>(args.tiles_m * ceil_div(p.n, Gemm::kColumns) * split);
  // Two CTAs that fit on one multiprocessor would share it, and leave other multiprocessors idle.
  const int shared = ctas <= gpu.multiprocessors ? gpu.shared_of_cta : Gemm::kSharedBytes;
  return sm90::launch_kernel(coded_tiled_kernel<Gemm>, args, ctas, Gemm::kThreads, shared, split, p.starts_early,
                             stream);
}

// These kernels handle int4 too, with another table.
template <typename Element, bool kGated>
cudaError_t launch_four_bits(const CodedProblem& p, const CodedPlan& plan, const Gpu& gpu, cudaStream_t stream) {
  constexpr Coding kCoding = Coding::kFourBits;
  switch (plan.tokens) {
    case 64:
      return launch_gemm<CodedTiled<kCoding, Element, kGated, 64>>(p, plan.split, gpu, stream);
    case 128:
      return launch_gemm<CodedTiled<kCoding, Element, kGated, 128>>(p, plan.split, gpu, stream);
    case 256:
      return launch_gemm<CodedTiled<kCoding, Element, kGated, 256>>(p, plan.split, gpu, stream);
  }
  return cudaErrorInvalidValue;
}

// Four warpgroups of a gated product share the rows of a.
template <Coding kCoding, typename Element, bool kGated>
cudaError_t launch_bytes(const CodedProblem& p, const CodedPlan& plan, const Gpu& gpu, cudaStream_t stream) {
  constexpr int kGroups = kGated ? 4 : 2;
  if (plan.groups != (plan.tokens > 64 ? 2 : kGroups)) return cudaErrorInvalidValue;
  switch (plan.tokens) {
    case 32:
      return launch_gemm<CodedTiled<kCoding, Element, kGated, 32, kGroups>>(p, plan.split, gpu, stream);
    case 64:
      return launch_gemm<CodedTiled<kCoding, Element, kGated, 64, kGroups>>(p, plan.split, gpu, stream);
    case 128:
      return launch_gemm<CodedTiled<kCoding, Element, kGated, 128>>(p, plan.split, gpu, stream);
  }
  return cudaErrorInvalidValue;
}

template <typename Element, bool kGated>
cudaError_t launch_of(const CodedProblem& p, const CodedPlan& plan, const Gpu& gpu, cudaStream_t stream) {
  switch (p.coding) {
    case Coding::kFp8:
      return launch_bytes<Coding::kFp8, Element, kGated>(p, plan, gpu, stream);
    case Coding::kInt8:
      return launch_bytes<Coding::kInt8, Element, kGated>(p, plan, gpu, stream);
    default:
      return launch_four_bits<Element, kGated>(p, plan, gpu, stream);
  }
}

template <typename Element>
cudaError_t launch(const CodedProblem& p, const CodedPlan& plan, const Gpu& gpu, cudaStream_t stream) {
  return p.gated() ? launch_of<Element, true>(p, plan, gpu, stream) : launch_of<Element, false>(p, plan, gpu, stream);
}

}  // namespace

cudaError_t launch_coded_tiled(const CodedProblem& p, const CodedPlan& plan, const Gpu& gpu, cudaStream_t stream) {
  return p.dtype == DType::kFloat16 ? launch<__half>(p, plan, gpu, stream)
                                    : launch<__nv_bfloat16>(p, plan, gpu, stream);
}

}  // namespace fused_mlp
