// The kernel of rotary embeddings, separate from its launch so that device-only compilers can compile this file.
#pragma once

#include "../norms/norm.cuh"
#include "rotary.h"

namespace fused_mlp {

constexpr int kRotaryThreads = 256;

// blockDim.x threads per token rotate all heads of its query and its key. Each thread handles a vector from the first
// half of a head's features, and the matching vector of the second half.
template <typename T, int Width>
__global__ void __launch_bounds__(kRotaryThreads) rotary_kernel(const __grid_constant__ Rotary p) {
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (row >= p.batch * p.tokens) return;
  const int64_t batch = row / p.tokens, token = row - batch * p.tokens;
  const unsigned packs = static_cast<unsigned>(p.half) / Width, of_queries = static_cast<unsigned>(p.of[0].heads);
  const unsigned items = (of_queries + static_cast<unsigned>(p.of[1].heads)) * packs;
  const T* const cos = static_cast<const T*>(p.cos.data) + batch * p.cos.of_batch + token * p.cos.of_token;
  const T* const sin = static_cast<const T*>(p.sin.data) + batch * p.sin.of_batch + token * p.sin.of_token;
  for (unsigned item = threadIdx.x; item < items; item += blockDim.x) {
    const unsigned either = item / packs, col = (item - either * packs) * Width;
    const bool is_key = either >= of_queries;
    const unsigned head = is_key ? either - of_queries : either;
    const Heads& heads = is_key ? p.of[1] : p.of[0];
    const auto offset = [&](const auto& strides) {
      return batch * strides[0] + head * strides[1] + token * strides[2] + col;
    };
    const T* const in = static_cast<const T*>(heads.in) + offset(heads.in_strides);
    T* const out = static_cast<T*>(heads.out) + offset(heads.out_strides);
    const auto low = read_pack<T, Width>(in, 0), high = read_pack<T, Width>(in, p.half);
    const auto low_cos = read_pack<T, Width>(cos, col), high_cos = read_pack<T, Width>(cos, p.half + col);
    const auto low_sin = read_pack<T, Width>(sin, col), high_sin = read_pack<T, Width>(sin, p.half + col);
    float first[Width], second[Width];
#pragma unroll
    for (int i = 0; i < Width; ++i) {
      const float to_first = p.inverse ? high.lane(i) * high_sin.lane(i) : -(high.lane(i) * low_sin.lane(i));
      const float to_second = p.inverse ? -(low.lane(i) * low_sin.lane(i)) : low.lane(i) * high_sin.lane(i);
      first[i] = fmaf(low.lane(i), low_cos.lane(i), to_first);
      second[i] = fmaf(high.lane(i), high_cos.lane(i), to_second);
    }
    store(out, first);
    store(out + p.half, second);
  }
}

}  // namespace fused_mlp
