// The kernels of a router whose scores are sigmoids (router.h), separate from their launch so that device-only
// compilers can compile this file.
#pragma once

#include "router.cuh"

namespace fused_mlp {

constexpr int kLogitsWarps = 4;   // per CTA, one expert each
constexpr int kLogitsTokens = 4;  // per CTA, to share the reads of a weight
constexpr int kLogitsStep = 8;    // 16-bit elements that a lane reads at a time

template <typename Element>
__device__ inline void widen(const Element* from, float (&to)[kLogitsStep]) {
  const uint4 bits = *reinterpret_cast<const uint4*>(from);
  const auto* elements = reinterpret_cast<const Element*>(&bits);
#pragma unroll
  for (int i = 0; i < kLogitsStep; ++i) to[i] = static_cast<float>(elements[i]);
}

// Products are exact and added up in float32, as if the operands were cast first.
template <typename Element>
__global__ void __launch_bounds__(kLogitsWarps * 32) logits_kernel(const __grid_constant__ RouterLogits p) {
  const int expert = static_cast<int>(blockIdx.x) * kLogitsWarps + static_cast<int>(threadIdx.x / 32);
  const int64_t first = int64_t{blockIdx.y} * kLogitsTokens;
  if (expert >= p.experts) return;
  const int lane = threadIdx.x % 32;
  const auto* weight = static_cast<const Element*>(p.weight.data) + expert * p.weight.row_stride;
  const auto* x = static_cast<const Element*>(p.x.data) + first * p.x.row_stride;
  const int count = static_cast<int>(min(int64_t{kLogitsTokens}, p.tokens - first));
  float sums[kLogitsTokens] = {};
#pragma unroll 4
  for (int64_t k = lane * kLogitsStep; k < p.k; k += 32 * kLogitsStep) {
    float of_weight[kLogitsStep], of_x[kLogitsStep];
    widen(weight + k, of_weight);
#pragma unroll
    for (int t = 0; t < kLogitsTokens; ++t) {
      if (t >= count) break;
      widen(x + t * p.x.row_stride + k, of_x);
#pragma unroll
      for (int i = 0; i < kLogitsStep; ++i) sums[t] = fmaf(of_weight[i], of_x[i], sums[t]);
    }
  }
#pragma unroll
  for (int t = 0; t < kLogitsTokens; ++t) {
    const float sum = warp_sum(sums[t]);
    if (lane == 0 && t < count) p.logits[(first + t) * p.experts + expert] = sum;
  }
}

// Maps a number to bits that have its order, starting at 1; 0 marks missing values. NaN comes last, as torch sorts it.
__device__ inline unsigned ordered_number(float value) {
  if (isnan(value)) return 0xffffffffu;
  const unsigned bits = __float_as_uint(value);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The lane with the largest key; of equal ones the first.
__device__ inline unsigned first_of_largest(unsigned key, unsigned place) {
  const unsigned largest = __reduce_max_sync(kAllLanes, key);
  return __reduce_min_sync(kAllLanes, key == largest ? place : kAllLanes);
}

// One warp per token: lane i holds the experts i, i + 32, and so on, and the state of group i.
template <int kPerLane>
__global__ void __launch_bounds__(kChoiceThreads) sigmoid_choice_kernel(const __grid_constant__ SigmoidChoice p) {
  const int64_t token = int64_t{blockIdx.x} * (kChoiceThreads / 32) + threadIdx.x / 32;
  if (token >= p.tokens) return;
  const int lane = static_cast<int>(threadIdx.x % 32), of_group = p.experts / p.groups;
  float scores[kPerLane];
  unsigned order[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int expert = lane + 32 * i;
    scores[i] = expert < p.experts ? 1.0f / (1.0f + expf(-p.logits[token * p.experts + expert])) : 0.0f;
    order[i] = expert < p.experts ? ordered_number(scores[i] + p.bias[expert]) : 0;
  }
  if (p.top_groups < p.groups) {
    // The sum of the two largest of each group. A NaN makes the sum NaN.
    float mine = 0.0f;
    for (int group = 0; group < p.groups; ++group) {
      float sum = 0.0f;
      unsigned taken = kAllLanes;
      for (int round = 0; round < 2; ++round) {
        unsigned best = 0, place = kAllLanes;
        float value = 0.0f;
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
          const unsigned expert = lane + 32 * i;
          const bool belongs = static_cast<int>(expert) < p.experts && static_cast<int>(expert) / of_group == group;
          if (belongs && expert != taken && order[i] > best) {
            best = order[i], place = expert, value = scores[i] + p.bias[expert];
          }
        }
        taken = first_of_largest(best, place);
        sum += __shfl_sync(kAllLanes, value, taken % 32);
      }
      if (lane == group) mine = sum;
    }
    unsigned key = lane < p.groups ? ordered_number(mine) : 0, kept = 0;
    for (int round = 0; round < p.top_groups; ++round) {
      const unsigned group = first_of_largest(key, lane);
      kept |= 1u << group;
      if (lane == static_cast<int>(group)) key = 0;
    }
    const unsigned none = ordered_number(-std::numeric_limits<float>::infinity());
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int expert = lane + 32 * i;
      if (expert < p.experts && !(kept >> expert / of_group & 1)) order[i] = none;
    }
  }

  float weight = 0.0f;  // of the choice with this lane's number
  unsigned expert = 0;
  for (int choice = 0; choice < p.chosen; ++choice) {
    unsigned best = 0, place = kAllLanes;
    float value = 0.0f;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (order[i] > best) best = order[i], place = lane + 32 * i, value = scores[i];
    }
    const unsigned first = first_of_largest(best, place);
    value = __shfl_sync(kAllLanes, value, first % 32);
    if (lane == choice) weight = value, expert = first;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (static_cast<unsigned>(lane + 32 * i) == first) order[i] = 0;
    }
  }
  if (p.normalized) weight /= warp_sum(weight) + 1e-20f;
  if (lane < p.chosen) {
    p.weights[token * p.chosen + lane] = weight * p.scaling;
    p.index[token * p.chosen + lane] = expert;
  }
}

}  // namespace fused_mlp
