// The kernel of DroppedRows.
#pragma once

#include "../../gemm/dropped.h"
#include "../../sm80/ptx.cuh"
#include "../../vector.cuh"

namespace fused_mlp::sm90 {

constexpr int kDroppedThreads = 512, kDroppedWarps = kDroppedThreads / 32;
constexpr int kDroppedTile = 16;    // rows per CTA
constexpr int kDroppedChunk = 128;  // columns per warp at a time: a lane has four times 8
constexpr int kRanksOfTile = 8;
constexpr int kPhiloxRounds = 10;

struct DroppedRowsArgs {
  Matrix x, a, out;
  int rows, cols, ranks;
  float scale;
  uint32_t keys[kPhiloxRounds][2];
  uint32_t first, first_high;  // of the counter
  uint32_t last_kept, threads;
  KeptBits kept;
};

// Computes the four numbers of a counter.
__device__ __forceinline__ void philox(uint32_t (&counter)[4], const uint32_t (&keys)[kPhiloxRounds][2]) {
#pragma unroll
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t first = uint64_t{0xD2511F53u} * counter[0], second = uint64_t{0xCD9E8D57u} * counter[2];
    counter[0] = static_cast<uint32_t>(second >> 32) ^ counter[1] ^ keys[round][0];
    counter[1] = static_cast<uint32_t>(second);
    counter[2] = static_cast<uint32_t>(first >> 32) ^ counter[3] ^ keys[round][1];
    counter[3] = static_cast<uint32_t>(first);
  }
}

// A vector's thread among torch's threads, and the number of earlier vectors of that thread.
struct DrawPlace {
  uint32_t thread, before;

  __device__ __forceinline__ void advance(uint32_t vectors, uint32_t threads) {
    thread += vectors;
    if (thread >= threads) {
      thread -= threads;
      ++before;
    }
  }
};

// Draws for eight adjacent elements, which are one or two of torch's vectors. Returns a bit per element, and sets
// `lanes` to ones at the 16-bit elements that are kept.
template <int kVector>
__device__ __forceinline__ uint32_t draw_eight(const DroppedRowsArgs& args, const DrawPlace& place,
                                               uint32_t (&lanes)[4]) {
  uint32_t bits = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t index = kVector == 8 ? 2 * place.before + half : place.before;
    const uint32_t low = args.first + index, high = args.first_high + (low < index);
    uint32_t numbers[4] = {low, high, place.thread + (kVector == 8 ? 0 : half), 0};
    philox(numbers, args.keys);
    uint32_t kept[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      kept[i] = numbers[i] <= args.last_kept ? ~0u : 0u;
      bits |= kept[i] & 1u << (4 * half + i);
    }
    lanes[2 * half] = (kept[0] & 0xffffu) | (kept[1] & 0xffff0000u);
    lanes[2 * half + 1] = (kept[2] & 0xffffu) | (kept[3] & 0xffff0000u);
  }
  return bits;
}

template <typename Element>
__device__ __forceinline__ uint4 vector_of_row(const Matrix& matrix, int row, int column, bool is_there) {
  if (!is_there) return make_uint4(0, 0, 0, 0);
  return *reinterpret_cast<const uint4*>(static_cast<const Element*>(matrix.data) + row * matrix.row_stride + column);
}

// Transposes bytes across four lanes, each of which has a byte of each of four words; returns the lane's word.
__device__ __forceinline__ uint32_t word_of_lane(uint32_t bytes) {
  const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
  const uint32_t halves = __byte_perm(bytes, __shfl_xor_sync(~0u, bytes, 1), odd ? 0x3715 : 0x6240);
  return __byte_perm(halves, __shfl_xor_sync(~0u, halves, 2), high ? 0x3276 : 0x5410);
}

// The sum over k is independent of the order of its elements within an instruction, so each lane passes eight adjacent
// ones. The sums of the warps are added in order.
template <typename Element, int kTiles, int kVector>
__global__ void __launch_bounds__(kDroppedThreads, kTiles > 2 ? 1 : 2)
    dropped_rows_kernel(const __grid_constant__ DroppedRowsArgs args) {
  __shared__ float of_warps[kTiles > 0 ? kDroppedWarps : 1][kDroppedTile * kRanksOfTile];
  constexpr int kOfWord = kWordColumns / kVector, kWalk = kDroppedWarps * kDroppedChunk;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int top = blockIdx.x * kDroppedTile + lane / 4;
  const bool is_there[2] = {top < args.rows, top + 8 < args.rows};
  DrawPlace places[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64_t element = (top + 8 * i) * int64_t{args.cols} + warp * kDroppedChunk + lane % 4 * 8;
    const uint32_t vector = static_cast<uint32_t>(element / kVector);
    places[i] = {vector % args.threads, vector / args.threads};
  }
  float sums[kTiles > 0 ? kTiles : 1][4] = {};
  for (int chunk = warp * kDroppedChunk; chunk < args.cols; chunk += kWalk) {
    uint32_t bytes[2] = {};
#pragma unroll 1
    for (int word = 0; word < kDroppedChunk / kWordColumns; ++word) {
      const int column = chunk + word * kWordColumns + lane % 4 * 8;
      const bool inside = column < args.cols;  // all lanes, or none
      uint4 x[2], factors[kTiles > 0 ? kTiles : 1];
      if constexpr (kTiles > 0) {
#pragma unroll
        for (int i = 0; i < 2; ++i) x[i] = vector_of_row<Element>(args.x, top + 8 * i, column, is_there[i] && inside);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          const int rank = tile * kRanksOfTile + lane / 4;
          factors[tile] = vector_of_row<Element>(args.a, rank, column, rank < args.ranks && inside);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t lanes[4];
        bytes[i] |= draw_eight<kVector>(args, places[i], lanes) << 8 * word;
        places[i].advance(kOfWord, args.threads);
        if constexpr (kTiles > 0) {
          x[i] = make_uint4(x[i].x & lanes[0], x[i].y & lanes[1], x[i].z & lanes[2], x[i].w & lanes[3]);
        }
      }
      if constexpr (kTiles > 0) {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          const uint4 b = factors[tile];
          sm80::Mma<Element>::multiply(sums[tile], {x[0].x, x[1].x, x[0].y, x[1].y}, {b.x, b.y});
          sm80::Mma<Element>::multiply(sums[tile], {x[0].z, x[1].z, x[0].w, x[1].w}, {b.z, b.w});
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t word = word_of_lane(bytes[i]);
      const int place = chunk / kWordColumns + lane % 4;
      if (is_there[i] && place < args.kept.words_of_row) {
        args.kept.words[(top + 8 * i) * args.kept.words_of_row + place] = word;
      }
      places[i].advance((kWalk - kDroppedChunk) / kVector, args.threads);
    }
  }
  if constexpr (kTiles > 0) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        of_warps[warp][(lane / 4 + i / 2 * 8) * kRanksOfTile + lane % 4 * 2 + i % 2] = sums[tile][i];
      }
      __syncthreads();
      const int row = blockIdx.x * kDroppedTile + threadIdx.x / kRanksOfTile;
      const int rank = tile * kRanksOfTile + threadIdx.x % kRanksOfTile;
      if (threadIdx.x < kDroppedTile * kRanksOfTile && row < args.rows && rank < args.ranks) {
        float sum = 0.0f;
#pragma unroll
        for (int source = 0; source < kDroppedWarps; ++source) sum += of_warps[source][threadIdx.x];
        static_cast<Element*>(args.out.data)[row * args.out.row_stride + rank] = from_float<Element>(args.scale * sum);
      }
      __syncthreads();
    }
  }
}

}  // namespace fused_mlp::sm90
