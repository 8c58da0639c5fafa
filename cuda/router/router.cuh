// The kernel of a mixture's router (router.h), separate from its launch so that device-only compilers can compile this
// file.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <limits>

#include "router.h"

namespace fused_mlp {

constexpr int kChoiceThreads = 128;
constexpr unsigned kAllLanes = 0xffffffff;

template <typename Operation>
__device__ inline float over_warp(float value, Operation operation) {
  for (int lanes = 16; lanes > 0; lanes /= 2) value = operation(value, __shfl_xor_sync(kAllLanes, value, lanes));
  return value;
}

__device__ inline float warp_sum(float value) {
  return over_warp(value, [](float a, float b) { return a + b; });
}

// Probabilities are not negative, so their bits have the same order. NaN comes last, as torch sorts it. 0 marks missing
// values.
__device__ inline unsigned ordered(float probability) {
  return isnan(probability) ? 0x7fc00001u : __float_as_uint(probability) + 1;
}

// One warp per token: lane i holds the experts i, i + 32, and so on.
template <typename Element, typename Weight, int kPerLane>
__global__ void __launch_bounds__(kChoiceThreads) choice_kernel(const __grid_constant__ Choice p) {
  const int64_t token = int64_t{blockIdx.x} * (kChoiceThreads / 32) + threadIdx.x / 32;
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

  float weight = 0.0f;  // of the choice with this lane's number
  unsigned expert = 0;
  for (unsigned choice = 0; choice < static_cast<unsigned>(p.chosen); ++choice) {
    unsigned best = 0, mine = kAllLanes;
    float value = 0.0f;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (order[i] > best) best = order[i], mine = lane + 32 * i, value = values[i];
    }
    const unsigned of_all = __reduce_max_sync(kAllLanes, best);
    const unsigned first = __reduce_min_sync(kAllLanes, best == of_all ? mine : kAllLanes);
    value = __shfl_sync(kAllLanes, value, first % 32);
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

}  // namespace fused_mlp
