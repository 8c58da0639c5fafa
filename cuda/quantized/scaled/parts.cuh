// Adds the sums of parts of k in order, for a layer without activation.
#pragma once

#include "layout.cuh"

namespace fused_mlp {

struct PartsArgs {
  const float* parts;       // [count, m, n]
  const float* row_scales;  // [n], for weight rows, or null
  const void* bias;         // [n], or null
  Matrix out;
  int count, m, n;
};

struct PartsSum {
  static constexpr int kThreads = 256, kValues = 8;  // per thread, per row
};

template <typename Element>
__global__ void __launch_bounds__(PartsSum::kThreads) add_parts_kernel(const __grid_constant__ PartsArgs args) {
  constexpr int kValues = PartsSum::kValues;
  allow_next_kernel();
  wait_for_previous_kernel();
  const int64_t vector = static_cast<int64_t>(blockIdx.x) * PartsSum::kThreads + threadIdx.x;
  const int of_row = args.n / kValues;
  const int64_t row = vector / of_row;
  const int column = static_cast<int>(vector % of_row) * kValues;
  if (row >= args.m) return;
  const float4* const place = reinterpret_cast<const float4*>(args.parts + row * args.n + column);
  const int64_t stride = static_cast<int64_t>(args.m) * args.n / 4;
  float value[kValues] = {};
#pragma unroll 4
  for (int part = 0; part < args.count; ++part) {
#pragma unroll
    for (int i = 0; i < kValues / 4; ++i) {
      const float4 four = __ldcs(place + part * stride + i);
      value[i * 4] += four.x;
      value[i * 4 + 1] += four.y;
      value[i * 4 + 2] += four.z;
      value[i * 4 + 3] += four.w;
    }
  }
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    if (args.row_scales != nullptr) value[i] *= __ldg(args.row_scales + column + i);
    if (args.bias != nullptr) value[i] += to_float(static_cast<const Element*>(args.bias)[column + i]);
  }
  store<Element, kValues>(static_cast<Element*>(args.out.data) + row * args.out.row_stride + column, value);
}

}  // namespace fused_mlp
