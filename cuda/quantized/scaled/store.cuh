// Stores tiles of scaled products, in 16 bits, or rounded to e4m3 again for the next product.
#pragma once

#include "layout.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

namespace fused_mlp {

// Calls take(i, column) for each of a thread's sums of a half with an even column: i and i + 1 are of one row, i + 2
// and i + 3 of the row 8 below it.
template <typename Gemm, typename Take>
__device__ __forceinline__ void for_each_column(int first_column, Take&& take) {
#pragma unroll
  for (int i = 0; i < Gemm::kSums; i += 4) take(i, first_column + i * 2 + threadIdx.x % 4 * 2);
}

// Multiplies sums by the scales of their weight rows, if rows have scales, and adds the bias.
template <typename Gemm>
__device__ __forceinline__ void finish_sums(const ScaledArgs& args, float (&sums)[Gemm::kSums],
                                            const CodedWeight& weight, const void* bias, int first_column) {
  if (args.by_rows) {
    for_each_column<Gemm>(first_column, [&](int i, int column) {
      const int64_t at = min(column, args.n - 2);
      const float even = __ldg(weight.scales + at), odd = __ldg(weight.scales + at + 1);
      sums[i] *= even;
      sums[i + 1] *= odd;
      sums[i + 2] *= even;
      sums[i + 3] *= odd;
    });
  }
  if (bias != nullptr) {
    for_each_column<Gemm>(first_column, [&](int i, int column) {
      const float2 pair = to_float2(load_bias_pair<typename Gemm::Element>(bias, column, args.n));
      sums[i] += pair.x;
      sums[i + 1] += pair.y;
      sums[i + 2] += pair.x;
      sums[i + 3] += pair.y;
    });
  }
}

// Passes the warp's box to the TMA.
__device__ __forceinline__ void send_box(const CUtensorMap& map, uint32_t box, int row, int column) {
  sm90::fence_shared_to_async();
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    sm90::tma_store(&map, box, column, row);
    sm90::tma_store_commit();
  }
}

// The boxes of a warp.
template <typename Gemm>
struct ScaledBoxes {
  const uint32_t first;
  int last = 0;

  // Returns the next box, after the TMA has read its last contents.
  __device__ __forceinline__ uint32_t next() {
    if (threadIdx.x % 32 == 0) sm90::tma_store_wait_read<Gemm::kBoxes - 1>();
    __syncwarp();
    last = (last + 1) % Gemm::kBoxes;
    return first + last * Gemm::kBoxBytes;
  }
};

// Stores a half's columns in 16 bits, 64 at a time. Rows of a box are 128 bytes in the TMA's swizzle.
template <typename Gemm>
__device__ __forceinline__ void store_half(const ScaledArgs& args, const float (&value)[Gemm::kSums],
                                           ScaledBoxes<Gemm>& boxes, int row, int column) {
  using Element = typename Gemm::Element;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    if (column + part * 64 >= args.n) return;  // a box taken but not sent would leave no group to wait for
    const uint32_t box = boxes.next(), place = (box + lane % 16 * 128) | ((lane / 16 ^ lane % 8) * 16);
#pragma unroll
    for (int j = 0; j < 4; ++j) {  // 16 columns
      const float* const of = value + part * 32 + j * 8;
      sm90::store_matrix_x4(place ^ j * 32, round_pair<Element>(of[0], of[1]), round_pair<Element>(of[2], of[3]),
                            round_pair<Element>(of[4], of[5]), round_pair<Element>(of[6], of[7]));
    }
    send_box(args.out, box, row, column + part * 64);
  }
}

// Rounds a half's columns, which are one group, to e4m3, and stores them and their scales.
template <typename Gemm>
__device__ __forceinline__ void store_rounded(const ScaledArgs& args, float (&value)[Gemm::kSums],
                                              ScaledBoxes<Gemm>& boxes, int row, int column) {
  if (column >= args.n) return;
  const int lane = threadIdx.x % 32;
  if (column + Gemm::kHalfN > args.n) {  // ignores columns outside
    for_each_column<Gemm>(column, [&](int i, int at) {
      if (at >= args.n) value[i] = value[i + 1] = value[i + 2] = value[i + 3] = 0.0f;
    });
  }
  float inverse[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float largest = 0.0f;
#pragma unroll
    for (int i = half * 2; i < Gemm::kSums; i += 4)
      largest = fmaxf(largest, fmaxf(fabsf(value[i]), fabsf(value[i + 1])));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    const float scale = e4m3_scale(largest);
    inverse[half] = __frcp_rn(scale);
    const int at = row + half * 8 + lane / 4;
    if (lane % 4 == 0 && at < args.m) {
      args.rounded.scales[column / kScaledGroup * args.rounded.scale_stride + at] = scale;
    }
  }
  const uint32_t box = boxes.next();
  // For two sets of eight columns, two lanes exchange a pair, so that each has four columns of one set.
  const bool odd = lane % 2 == 1;
  const uint32_t of_row = box + lane / 4 * 128, in_piece = (lane % 4 / 2 * 4) + (odd ? 8 : 0), swizzle = lane / 4 * 16;
#pragma unroll
  for (int i = 0; i < Gemm::kSums; i += 8) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float by = inverse[half];
      const float* const of = value + i + half * 2;
      const uint32_t pairs = e4m3_pair(of[0] * by, of[1] * by) | e4m3_pair(of[4] * by, of[5] * by) << 16;
      const uint32_t others = __shfl_xor_sync(~0u, pairs, 1);
      sm90::store_shared((of_row + half * 1024 + in_piece) | (i * 2 ^ swizzle),
                         __byte_perm(pairs, others, odd ? 0x3276 : 0x5410));
    }
  }
  send_box(args.out, box, row, column / 2);  // in 16-bit words
}

// Stores the sums of a half's columns for a part of k.
template <typename Gemm>
__device__ __forceinline__ void store_part(const ScaledArgs& args, const float (&sums)[Gemm::kSums], int part, int row,
                                           int first_column) {
  const int first_row = row + threadIdx.x % 32 / 4;
  float* const out = args.parts + (static_cast<int64_t>(part) * args.m + first_row) * args.n;
  for_each_column<Gemm>(first_column, [&](int i, int column) {
    if (column >= args.n) return;
    if (first_row < args.m) *reinterpret_cast<float2*>(out + column) = make_float2(sums[i], sums[i + 1]);
    if (first_row + 8 < args.m) {
      *reinterpret_cast<float2*>(out + int64_t{8} * args.n + column) = make_float2(sums[i + 2], sums[i + 3]);
    }
  });
}

// Stores the warp's 16 rows of a tile. Leaves the sums undefined.
template <typename Gemm>
__device__ __forceinline__ void store_tile(const ScaledArgs& args, ScaledSums<Gemm>& sums, ScaledBoxes<Gemm>& boxes,
                                           const ScaledTile& tile) {
  using Element = typename Gemm::Element;
  constexpr int kOutputs = Gemm::kGated ? 1 : Gemm::kHalves;
  if constexpr (!Gemm::kGated) {
    if (args.parts != nullptr) {
#pragma unroll
      for (int half = 0; half < Gemm::kHalves; ++half) {
        store_part<Gemm>(args, sums[half], tile.part, tile.row, tile.column + half * Gemm::kHalfN);
      }
      return;
    }
  }
  if constexpr (Gemm::kGated) {
    finish_sums<Gemm>(args, sums[1], args.of_up_weight, args.epilogue.up_bias, tile.column);
  }
#pragma unroll 1
  for (int output = 0; output < kOutputs; ++output) {
    const int column = tile.column + output * Gemm::kHalfN;
    finish_sums<Gemm>(args, sums[0], args.of_weight, args.epilogue.bias, column);
    visit_activation(args.epilogue.activation, [&]<Activation A>() {
      float value[Gemm::kSums];
      GluEpilogue<Gemm::kProduct>::apply(value, FixedActivation<A, Element>(), [&](Operand operand, auto&& take) {
        const auto& of = sums[operand == Operand::kUp ? 1 : 0];
#pragma unroll
        for (int i = 0; i < Gemm::kSums; ++i) take(i, of[i]);
      });
#pragma unroll
      for (int i = 0; i < Gemm::kSums; ++i) sums[0][i] = value[i];
    });
    if (args.rounded.data != nullptr) {
      store_rounded<Gemm>(args, sums[0], boxes, tile.row, column);
    } else {
      store_half<Gemm>(args, sums[0], boxes, tile.row, column);
    }
    if constexpr (!Gemm::kGated) {
#pragma unroll
      for (int i = 0; i < Gemm::kSums; ++i) sums[0][i] = sums[1][i];
    }
  }
}

}  // namespace fused_mlp

#endif
