#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <limits>
#include <type_traits>

#include "router.h"

namespace fused_mlp {
namespace {

constexpr int kThreads = 128;
constexpr unsigned kAll = 0xffffffff;

template <typename Operation>
__device__ float over_warp(float value, Operation operation) {
  for (int lanes = 16; lanes > 0; lanes /= 2) value = operation(value, __shfl_xor_sync(kAll, value, lanes));
  return value;
}

__device__ float warp_sum(float value) {
  return over_warp(value, [](float a, float b) { return a + b; });
}

// Probabilities are not negative, so that their bits are in their order. NaN comes last, as torch sorts it. 0 is left
// for what is not there.
__device__ unsigned ordered(float probability) {
  return isnan(probability) ? 0x7fc00001u : __float_as_uint(probability) + 1;
}

}  // namespace

// A warp for each token: lane i holds the experts i, i + 32, and so on.
template <typename Element, typename Weight, int kPerLane>
__global__ void __launch_bounds__(kThreads) choice_kernel(const __grid_constant__ Choice p) {
  const int64_t token = int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
  if (token >= p.tokens) return;
  const unsigned lane = threadIdx.x % 32;
  const Element* logits = static_cast<const Element*>(p.logits) + token * p.experts;
  float values[kPerLane], largest = -std::numeric_limits<float>::infinity();
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int expert = static_cast<int>(lane) + 32 * i;
    values[i] = expert < p.experts ? static_cast<float>(logits[expert]) : -std::numeric_limits<float>::infinity();
    largest = fmaxf(largest, values[i]);
  }
  largest = over_warp(largest, [](float a, float b) { return fmaxf(a, b); });
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const bool there = static_cast<int>(lane) + 32 * i < p.experts;
    values[i] = there ? expf(values[i] - largest) : 0.0f;
    sum += values[i];
  }
  sum = warp_sum(sum);
  unsigned order[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    values[i] /= sum;
    order[i] = static_cast<int>(lane) + 32 * i < p.experts ? ordered(values[i]) : 0;
  }

  float weight = 0.0f;  // that of the choice with this lane's number
  unsigned expert = 0;
  for (unsigned choice = 0; choice < static_cast<unsigned>(p.chosen); ++choice) {
    unsigned best = 0, mine = kAll;
    float value = 0.0f;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (order[i] > best) best = order[i], mine = lane + 32 * i, value = values[i];
    }
    const unsigned of_all = __reduce_max_sync(kAll, best);
    const unsigned first = __reduce_min_sync(kAll, best == of_all ? mine : kAll);
    value = __shfl_sync(kAll, value, first % 32);
    if (lane == choice) weight = value, expert = first;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (lane + 32 * i == first) order[i] = 0;
    }
  }
  if (p.normalized) weight /= warp_sum(weight);
  if (lane < static_cast<unsigned>(p.chosen)) {
    static_cast<Weight*>(p.weights)[token * p.chosen + lane] = static_cast<Weight>(weight);
    p.index[token * p.chosen + lane] = expert;
  }
}

namespace {

template <typename Element, typename Weight>
cudaError_t launch(const Choice& p, cudaStream_t stream) {
  const auto run = [&]<int kPerLane>(std::integral_constant<int, kPerLane>) {
    constexpr int kTokens = kThreads / 32;
    choice_kernel<Element, Weight, kPerLane>
        <<<static_cast<unsigned>((p.tokens + kTokens - 1) / kTokens), kThreads, 0, stream>>>(p);
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

}  // namespace fused_mlp
