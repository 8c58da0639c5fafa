// Stores tiles of scaled products: in 16 bits, or rounded to e4m3 again for the product behind.
#pragma once

#include "layout.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

namespace fused_mlp {

// Calls take(i, column) for those of a thread's sums of a half, from kFrom on, that have an even column: i and i + 1
// are of one row, i + 2 and i + 3 of the row 8 below it.
template <typename Gemm, int kFrom = 0, int kTo = Gemm::kSums, typename Take>
__device__ __forceinline__ void for_each_column(int first_column, Take&& take) {
#pragma unroll
  for (int i = kFrom; i < kTo; i += 4) take(i, first_column + (i - kFrom) * 2 + threadIdx.x % 4 * 2);
}

// Multiplies sums by the scales of their weight rows, where they have one each, and adds the bias.
template <typename Gemm, int kFrom = 0, int kTo = Gemm::kSums>
__device__ __forceinline__ void finish_sums(const ScaledArgs& args, float (&sums)[Gemm::kSums],
                                            const CodedWeight& weight, const void* bias, int first_column) {
  if (args.by_rows) {
    for_each_column<Gemm, kFrom, kTo>(first_column, [&](int i, int column) {
      const int64_t at = min(column, args.n - 2);
      const float even = __ldg(weight.scales + at), odd = __ldg(weight.scales + at + 1);
      sums[i] *= even;
      sums[i + 1] *= odd;
      sums[i + 2] *= even;
      sums[i + 3] *= odd;
    });
  }
  if (bias != nullptr) {
    for_each_column<Gemm, kFrom, kTo>(first_column, [&](int i, int column) {
      const float2 pair = to_float2(load_bias_pair<typename Gemm::Element>(bias, column, args.n));
      sums[i] += pair.x;
      sums[i + 1] += pair.y;
      sums[i + 2] += pair.x;
      sums[i + 3] += pair.y;
    });
  }
}

// Hands the warp's box to the TMA.
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

  // Waits until the TMA has read what was last in it.
  __device__ __forceinline__ uint32_t next() {
    if (threadIdx.x % 32 == 0) sm90::tma_store_wait_read<Gemm::kBoxes - 1>();
    __syncwarp();
    last ^= 1;
    return first + last * Gemm::kBoxBytes;
  }

  // The first box of the first warpgroup's warp, which waits until the TMA has read it.
  __device__ __forceinline__ uint32_t of_both(int group) {
    if (threadIdx.x % 32 == 0) sm90::tma_store_wait_read<0>();
    __syncwarp();
    last = 0;
    return first - group * 4 * Gemm::kBoxes * Gemm::kBoxBytes;
  }
};

// Stores 128 columns in 16 bits, 64 at a time, or a part of them alone, where it is not negative. Rows of a box are 128
// bytes in the TMA's swizzle.
template <typename Gemm>
__device__ __forceinline__ void store_half(const ScaledArgs& args, const float (&value)[Gemm::kSums],
                                           ScaledBoxes<Gemm>& boxes, int row, int column, int alone) {
  using Element = typename Gemm::Element;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    if (alone == 1 - part) continue;
    const uint32_t box = boxes.next(), place = (box + lane % 16 * 128) | ((lane / 16 ^ lane % 8) * 16);
#pragma unroll
    for (int j = 0; j < 4; ++j) {  // 16 columns
      const float* const of = value + part * 32 + j * 8;
      sm90::store_matrix_x4(place ^ j * 32, round_pair<Element>(of[0], of[1]), round_pair<Element>(of[2], of[3]),
                            round_pair<Element>(of[4], of[5]), round_pair<Element>(of[6], of[7]));
    }
    if (column + part * 64 < args.n) send_box(args.out, box, row, column + part * 64);
  }
}

// Rounds 128 columns, which are a group, to e4m3, and stores them and their scales. Where warpgroups share rows, one
// has the first half of the columns, and a warp of it sends the box that both have filled.
template <typename Gemm>
__device__ __forceinline__ void store_rounded(const ScaledArgs& args, const ScaledShared<Gemm>& shared,
                                              float (&value)[Gemm::kSums], ScaledBoxes<Gemm>& boxes, int row,
                                              int column, int warp, bool shares) {
  const int lane = threadIdx.x % 32, group = warp / 4;
  const auto lacks = [&](int i) { return shares && i * 2 / Gemm::kSums != group; };
  if (column + Gemm::kHalfN > args.n) {  // what lies outside does not count
    for_each_column<Gemm>(column, [&](int i, int at) {
      if (at >= args.n) value[i] = value[i + 1] = value[i + 2] = value[i + 3] = 0.0f;
    });
  }
  float largest[2], inverse[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    largest[half] = 0.0f;
#pragma unroll
    for (int i = half * 2; i < Gemm::kSums; i += 4) {
      if (!lacks(i)) largest[half] = fmaxf(largest[half], fmaxf(fabsf(value[i]), fabsf(value[i + 1])));
    }
    largest[half] = fmaxf(largest[half], __shfl_xor_sync(~0u, largest[half], 1));
    largest[half] = fmaxf(largest[half], __shfl_xor_sync(~0u, largest[half], 2));
    if (shares && lane % 4 == 0) {
      sm90::store_shared_float(shared.largest(warp) + (half * 8 + lane / 4) * 4, largest[half]);
    }
  }
  const uint32_t box = shares ? boxes.of_both(group) : boxes.next();
  if (shares) sm90::named_barrier_sync(1, Gemm::kConsumers);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (shares) {
      float other;
      asm volatile("ld.shared.f32 %0, [%1];"
                   : "=f"(other)
                   : "r"(shared.largest(warp ^ 4) + (half * 8 + lane / 4) * 4)
                   : "memory");
      largest[half] = fmaxf(largest[half], other);
    }
    const float scale = scale_of_group(largest[half]);
    inverse[half] = __frcp_rn(scale);
    const int at = row + half * 8 + lane / 4;
    if (lane % 4 == 0 && at < args.m && !(shares && group == 1)) {
      args.rounded.scales[column / kScaledGroup * args.rounded.scale_stride + at] = scale;
    }
  }
  // For two eights of columns, two lanes exchange a pair, so that each has four columns of one of them.
  const bool odd = lane % 2 == 1;
  const uint32_t of_row = box + lane / 4 * 128, in_piece = (lane % 4 / 2 * 4) + (odd ? 8 : 0), swizzle = lane / 4 * 16;
#pragma unroll
  for (int i = 0; i < Gemm::kSums; i += 8) {
    if (lacks(i)) continue;
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
  if (shares) {
    sm90::fence_shared_to_async();
    sm90::named_barrier_sync(1, Gemm::kConsumers);
    if (group == 1) return;
  }
  send_box(args.out, box, row, column / 2);  // in words of 16 bits
}

// Stores the sums of a half's columns of a part of k.
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

// Stores the warp's 16 rows of a tile, or where the warpgroups share rows, its half of their columns. Leaves the sums
// undefined.
template <typename Gemm>
__device__ __forceinline__ void store_tile(const ScaledArgs& args, const ScaledShared<Gemm>& shared,
                                           ScaledSums<Gemm>& sums, ScaledBoxes<Gemm>& boxes, const ScaledTile& tile,
                                           int warp, bool shares) {
  using Element = typename Gemm::Element;
  using Epilogue = GluEpilogue<Gemm::kProduct>;
  constexpr int kSums = Gemm::kSums, kPart = kSums / 2;
  const int group = warp / 4;
  if constexpr (Gemm::kGated) {
#pragma unroll
    for (int half = 0; half < Gemm::kHalves; ++half) {
      const int column = tile.column + half * Gemm::kBoxN;
      finish_sums<Gemm, 0, kPart>(args, sums[half], args.of_weight, args.epilogue.bias, column);
      finish_sums<Gemm, kPart, kSums>(args, sums[half], args.of_up_weight, args.epilogue.up_bias, column);
    }
    visit_activation(args.epilogue.activation, [&]<Activation A>() {
#pragma unroll
      for (int half = 0; half < Gemm::kHalves; ++half) {
        if (shares && half != group) continue;
        float value[kPart];
        Epilogue::apply(value, FixedActivation<A, Element>(), [&](Operand operand, auto&& take) {
#pragma unroll
          for (int i = 0; i < kPart; ++i) take(i, sums[half][operand == Operand::kUp ? kPart + i : i]);
        });
        // All results to the first half's places.
#pragma unroll
        for (int i = 0; i < kPart; ++i) sums[0][half * kPart + i] = value[i];
      }
    });
    if (args.rounded.data != nullptr) {
      store_rounded<Gemm>(args, shared, sums[0], boxes, tile.row, tile.column, warp, shares);
    } else {
      store_half<Gemm>(args, sums[0], boxes, tile.row, tile.column, shares ? group : -1);
    }
  } else {
#pragma unroll 1
    for (int half = 0; half < Gemm::kHalves; ++half) {
      if (half == 1) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) sums[0][i] = sums[1][i];
      }
      if (shares && half != group) continue;
      const int column = tile.column + half * Gemm::kHalfN;
      if (args.parts != nullptr) {
        store_part<Gemm>(args, sums[0], tile.part, tile.row, column);
        continue;
      }
      finish_sums<Gemm>(args, sums[0], args.of_weight, args.epilogue.bias, column);
      visit_activation(args.epilogue.activation, [&]<Activation A>() {
        float value[kSums];
        Epilogue::apply(value, FixedActivation<A, Element>(), [&](Operand, auto&& take) {
#pragma unroll
          for (int i = 0; i < kSums; ++i) take(i, sums[0][i]);
        });
#pragma unroll
        for (int i = 0; i < kSums; ++i) sums[0][i] = value[i];
      });
      if (args.rounded.data == nullptr) {
        store_half<Gemm>(args, sums[0], boxes, tile.row, column, -1);
      } else if (column < args.n) {
        store_rounded<Gemm>(args, shared, sums[0], boxes, tile.row, column, warp, false);
      }
    }
  }
}

}  // namespace fused_mlp

#endif
