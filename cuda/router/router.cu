#include <type_traits>

#include "router.cuh"
#include "sigmoid_router.cuh"

namespace fused_mlp {
namespace {

template <typename Element, typename Weight>
cudaError_t launch(const Choice& p, cudaStream_t stream) {
  const auto run = [&]<int kPerLane>(std::integral_constant<int, kPerLane>) {
    constexpr int kTokens = kChoiceThreads / 32;
    choice_kernel<Element, Weight, kPerLane>
        <<<static_cast<unsigned>((p.tokens + kTokens - 1) / kTokens), kChoiceThreads, 0, stream>>>(p);
    return cudaGetLastError();
  };
  if (p.experts <= 32) return run(std::integral_constant<int, 1>());
  if (p.experts <= 128) return run(std::integral_constant<int, 4>());
  return run(std::integral_constant<int, kMaxRoutedExperts / 32>());
}

template <typename Element>
cudaError_t launch_of(const Choice& p, cudaStream_t stream) {
  return p.narrow ? launch<Element, Element>(p, stream) : launch<Element, float>(p, stream);
}

}  // namespace

cudaError_t launch_choice(const Choice& p, cudaStream_t stream) {
  switch (p.dtype) {
    case DType::kFloat32:
      return launch<float, float>(p, stream);
    case DType::kFloat16:
      return launch_of<__half>(p, stream);
    case DType::kBFloat16:
      return launch_of<__nv_bfloat16>(p, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t launch_logits(const RouterLogits& p, cudaStream_t stream) {
  const dim3 ctas(static_cast<unsigned>((p.experts + kLogitsWarps - 1) / kLogitsWarps),
                  static_cast<unsigned>((p.tokens + kLogitsTokens - 1) / kLogitsTokens));
  auto* const kernel = p.dtype == DType::kFloat16 ? logits_kernel<__half> : logits_kernel<__nv_bfloat16>;
  kernel<<<ctas, kLogitsWarps * 32, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t launch_sigmoid_choice(const SigmoidChoice& p, cudaStream_t stream) {
  constexpr int kTokens = kChoiceThreads / 32;
  auto* const kernel = p.experts <= 128   ? sigmoid_choice_kernel<4>
                       : p.experts <= 256 ? sigmoid_choice_kernel<8>
                                          : sigmoid_choice_kernel<kMaxRoutedExperts / 32>;
  kernel<<<static_cast<unsigned>((p.tokens + kTokens - 1) / kTokens), kChoiceThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace fused_mlp
