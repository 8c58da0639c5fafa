// Rounds rows to e4m3: each group of columns has its own scale, amax / 448.
#pragma once

#include "layout.cuh"

namespace fused_mlp {

struct RoundArgs {
  Matrix x;
  ScaledRows rounded;
  int rows, columns;
};

// Half a warp has a group of a row, and a thread has eight values of it.
struct Rounding {
  static constexpr int kThreads = 256, kLanes = 16, kValues = kScaledGroup / kLanes;
  static constexpr int kRows = kThreads / kLanes, kGroups = 2;  // per CTA
};

template <typename Element>
__global__ void __launch_bounds__(Rounding::kThreads) round_kernel(const __grid_constant__ RoundArgs args) {
  using R = Rounding;
  allow_next_kernel();
  const int row = blockIdx.x * R::kRows + threadIdx.x / R::kLanes, lane = threadIdx.x % R::kLanes;
  const int first_group = blockIdx.y * R::kGroups;
  const bool inside = row < args.rows;
  const auto column_of = [&](int group) { return (first_group + group) * kScaledGroup + lane * R::kValues; };
  Packed<Element, R::kValues> read[R::kGroups] = {};
#pragma unroll
  for (int group = 0; group < R::kGroups; ++group) {
    if (!inside || column_of(group) >= args.columns) continue;
    const auto* const place = static_cast<const Element*>(args.x.data) + row * args.x.row_stride + column_of(group);
    *reinterpret_cast<uint4*>(&read[group]) = __ldg(reinterpret_cast<const uint4*>(place));
  }
#pragma unroll
  for (int group = 0; group < R::kGroups; ++group) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < R::kValues; ++i) largest = fmaxf(largest, fabsf(read[group].lane(i)));
#pragma unroll
    for (int distance = R::kLanes / 2; distance > 0; distance /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
    }
    if (!inside || column_of(group) >= args.columns) continue;
    const float scale = e4m3_scale(largest);
    uint32_t pairs[R::kValues / 2];
#pragma unroll
    for (int i = 0; i < R::kValues / 2; ++i) {
      pairs[i] = e4m3_pair(__fdiv_rn(read[group].lane(2 * i), scale), __fdiv_rn(read[group].lane(2 * i + 1), scale));
    }
    *reinterpret_cast<uint2*>(args.rounded.data + row * args.rounded.row_bytes + column_of(group)) =
        make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
    if (lane == 0) args.rounded.scales[(first_group + group) * args.rounded.scale_stride + row] = scale;
  }
  wait_for_previous_kernel();  // the next kernel only waits for this one
}

}  // namespace fused_mlp
