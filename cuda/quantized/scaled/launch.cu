// Launches the scaled e4m3 products, and the rounding before them.
#include <algorithm>
#include <type_traits>

#include "../../gemm/shared_memory.cuh"
#include "../../sm90/launch.cuh"
#include "gemm.cuh"
#include "parts.cuh"
#include "round.cuh"

namespace fused_mlp {
namespace {

// Rows of bytes, as 16-bit elements.
bool encode_bytes(CUtensorMap* map, const void* data, int64_t row_bytes, int64_t rows, int64_t columns, int box_rows) {
  const Matrix words{const_cast<void*>(data), row_bytes / 2};
  return sm90::encode_tensor_map(map, DType::kBFloat16, words, rows, columns / 2, box_rows, kScaledGroup / 2);
}

template <typename Gemm>
cudaError_t launch_gemm(const CodedProblem& p, const CodedPlan& plan, const ScaledRows& a, const ScaledRows& rounded,
                        float* parts, const Gpu& gpu, cudaStream_t stream, const ScaledExperts& experts) {
  ScaledArgs args{};
  args.experts = experts;
  args.a_rows = a;
  args.of_weight = p.weight;
  args.of_up_weight = p.up_weight;
  args.rounded = rounded;
  args.parts = plan.split > 1 ? parts : nullptr;
  args.epilogue = p.epilogue;
  args.m = static_cast<int>(p.m);
  args.n = static_cast<int>(p.n);
  args.k = static_cast<int>(p.k);
  args.k_blocks = static_cast<int>(ceil_div(p.k, Gemm::kBlockK));
  args.pair = plan.pair;
  args.split = plan.split;
  args.units_m = static_cast<int>(ceil_div(p.m, Gemm::kTileM * plan.pair));
  args.tiles_n = static_cast<int>(ceil_div(p.n, Gemm::kColumns));
  args.loaded_rows = static_cast<int>(std::min<int64_t>(p.m, Gemm::kTileM));
  args.by_rows = p.weight.scale_rows == 1;
  const auto encode_weight = [&](CUtensorMap* map, const CodedWeight& weight) {
    const int64_t rows = experts.experts > 0 ? (experts.experts - 1) * experts.weight_rows + p.n : p.n;
    return encode_bytes(map, weight.data, p.k, rows, p.k, Gemm::kHalfN);
  };
  const bool mapped =
      (experts.token_of_row != nullptr || encode_bytes(&args.a, a.data, a.row_bytes, p.m, p.k, args.loaded_rows)) &&
      encode_weight(&args.weight, p.weight) && (!Gemm::kGated || encode_weight(&args.up_weight, p.up_weight)) &&
      (rounded.data != nullptr ? encode_bytes(&args.out, rounded.data, rounded.row_bytes, p.m, p.n, Gemm::kBoxRows)
                               : sm90::encode_tensor_map(&args.out, p.dtype, p.out, p.m, p.n, Gemm::kBoxRows, 64));
  if (!mapped) return cudaErrorInvalidValue;
  constexpr auto kKernel = scaled_kernel<Gemm>;
  const cudaError_t error = allow_shared_memory<kKernel>(Gemm::kSharedBytes);
  if (error != cudaSuccess) return error;
  const int tiles = args.units_m * args.tiles_n * plan.split;
  const int clusters = std::min(tiles, gpu.multiprocessors / plan.pair);
  return sm90::launch_kernel(kKernel, args, clusters * plan.pair, Gemm::kThreads, Gemm::kSharedBytes, plan.pair, true,
                             stream);
}

template <typename Element>
cudaError_t launch_sum(const CodedProblem& p, const CodedPlan& plan, const float* parts, cudaStream_t stream) {
  const float* const row_scales = p.weight.scale_rows == 1 ? p.weight.scales : nullptr;
  const PartsArgs args{
      parts, row_scales, p.epilogue.bias, p.out, plan.split, static_cast<int>(p.m), static_cast<int>(p.n)};
  const int64_t vectors = p.m * (p.n / PartsSum::kValues);
  return sm90::launch_kernel(add_parts_kernel<Element>, args, static_cast<int>(ceil_div(vectors, PartsSum::kThreads)),
                             PartsSum::kThreads, 0, 1, true, stream);
}

template <typename Element>
cudaError_t launch_of(const CodedProblem& p, const CodedPlan& plan, const ScaledRows& a, const ScaledRows& rounded,
                      float* parts, const Gpu& gpu, cudaStream_t stream, const ScaledExperts& experts) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    if (experts.experts > 0) {
      return p.gated()
                 ? launch_gemm<ScaledGemm<Element, true, true>>(p, plan, a, rounded, parts, gpu, stream, experts)
                 : launch_gemm<ScaledGemm<Element, false, true>>(p, plan, a, rounded, parts, gpu, stream, experts);
    }
  }
  if (p.gated()) return launch_gemm<ScaledGemm<Element, true>>(p, plan, a, rounded, parts, gpu, stream, experts);
  const cudaError_t error = launch_gemm<ScaledGemm<Element, false>>(p, plan, a, rounded, parts, gpu, stream, experts);
  return error != cudaSuccess || plan.split == 1 ? error : launch_sum<Element>(p, plan, parts, stream);
}

template <typename Element>
cudaError_t launch_rounding_of(const CodedProblem& p, const ScaledRows& rounded, bool starts_early,
                               cudaStream_t stream) {
  using R = Rounding;
  const RoundArgs args{p.a, rounded, static_cast<int>(p.m), static_cast<int>(p.k)};
  const dim3 grid(ceil_div(p.m, R::kRows), ceil_div(ceil_div(p.k, kScaledGroup), R::kGroups));
  return sm90::launch_kernel(round_kernel<Element>, args, grid, R::kThreads, 0, 1, starts_early, stream);
}

}  // namespace

cudaError_t launch_scaled(const CodedProblem& p, const CodedPlan& plan, const ScaledRows& a, const ScaledRows& rounded,
                          float* parts, const Gpu& gpu, cudaStream_t stream, const ScaledExperts& experts) {
  return p.dtype == DType::kFloat16 ? launch_of<__half>(p, plan, a, rounded, parts, gpu, stream, experts)
                                    : launch_of<__nv_bfloat16>(p, plan, a, rounded, parts, gpu, stream, experts);
}

cudaError_t launch_rounding(const CodedProblem& p, const ScaledRows& rounded, bool starts_early, cudaStream_t stream) {
  return p.dtype == DType::kFloat16 ? launch_rounding_of<__half>(p, rounded, starts_early, stream)
                                    : launch_rounding_of<__nv_bfloat16>(p, rounded, starts_early, stream);
}

}  // namespace fused_mlp
