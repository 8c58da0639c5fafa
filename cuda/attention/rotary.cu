#include <algorithm>

#include "rotary.cuh"

namespace fused_mlp {
namespace {

template <typename T, int Width>
cudaError_t launch(const Rotary& p, cudaStream_t stream) {
  const int64_t items = (p.of[0].heads + p.of[1].heads) * (p.half / Width);
  const auto threads = static_cast<unsigned>(std::clamp<int64_t>(ceil_div(items, 32) * 32, 32, kRotaryThreads));
  const dim3 block(threads, kRotaryThreads / threads);
  const auto blocks = static_cast<unsigned>(ceil_div(p.batch * p.tokens, block.y));
  rotary_kernel<T, Width><<<blocks, block, 0, stream>>>(p);
  return cudaGetLastError();
}

template <typename T>
cudaError_t run(const Rotary& p, cudaStream_t stream) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  const auto aligned = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % kVectorBytes == 0; };
  const auto whole = [](const auto&... strides) { return ((strides % kWidth == 0) && ...); };
  bool vectors = whole(p.half);
  for (const Heads& each : p.of) {
    for (const auto& strides : {each.in_strides, each.out_strides}) {
      vectors = vectors && whole(strides[0], strides[1], strides[2]);
    }
    vectors = vectors && aligned(each.in) && aligned(each.out);
  }
  for (const Angles& each : {p.cos, p.sin}) {
    vectors = vectors && aligned(each.data) && whole(each.of_batch, each.of_token);
  }
  return vectors ? launch<T, kWidth>(p, stream) : launch<T, 1>(p, stream);
}

}  // namespace

cudaError_t launch_rotary(const Rotary& rotary, cudaStream_t stream) {
  return visit_dtype(rotary.dtype,
                     [&](auto* element) { return run<std::remove_pointer_t<decltype(element)>>(rotary, stream); });
}

}  // namespace fused_mlp
