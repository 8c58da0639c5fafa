// The rows of an adapter, by CTAs of the streamed kernel that adds the adapter's term: its first ones, which have no
// tile. The others multiply meanwhile, and read the rows when their own sums are done. No CTA of these waits for
// another, and a GPU starts the first of a grid first: so all of them end.
#pragma once

#include "../../overlap.cuh"
#include "../../vector.cuh"
#include "../main_loop.cuh"

namespace fused_mlp::sm80 {

// CTAs make eight of the ranks each, by a part of k: [parts, tokens, 8 * groups] sums in all. `made` counts the CTAs
// that are done.
struct RankTerm {
  Matrix factor, b;  // [ranks, k], [n, ranks]
  unsigned* made;
  float* sums;
  int ranks, groups, parts;
  float scale;

  constexpr int ctas() const { return groups * parts; }
  constexpr int padded() const { return 8 * groups; }
};

// The sum over k does not depend on which element of k is which in an instruction, so each lane hands over eight
// adjacent ones. The sums of the warps are added in their order.
template <typename Gemm>
__device__ __forceinline__ void make_rank_rows(const typename Gemm::Args& args) {
  using Element = typename Gemm::Element;
  constexpr int kWarps = Gemm::Tile::kThreads / 32, kTiles = (Gemm::kTokens + kMmaM - 1) / kMmaM;
  constexpr int kBlock = 32, kGroup = 8;  // elements of k of a warp at a time, ranks
  constexpr int kBatch = 8;               // blocks that a warp asks for before it multiplies the first
  static_assert(kWarps * kTiles * kMmaM * kGroup * sizeof(float) <= Gemm::kSharedBytes);
  extern __shared__ __align__(128) uint8_t raw_shared[];
  float* const of_warps = reinterpret_cast<float*>(raw_shared);
  const RankTerm& term = args.term;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_rank = blockIdx.x % term.groups * kGroup, part = blockIdx.x / term.groups;
  const int blocks = (args.k + kBlock - 1) / kBlock;
  const int begin = part * blocks / term.parts, end = (part + 1) * blocks / term.parts;
  const int last = min(end * kBlock, args.k);
  const auto vector = [&](const Matrix& matrix, int row, int rows, int column) {
    if (row >= rows || column >= last) return make_uint4(0, 0, 0, 0);
    return *reinterpret_cast<const uint4*>(static_cast<const Element*>(matrix.data) + row * matrix.row_stride + column);
  };

  constexpr int kLine = 128 / sizeof(Element);
  for (int i = threadIdx.x; i < (end - begin) * kBlock / kLine * kGroup; i += Gemm::Tile::kThreads) {
    const int row = first_rank + i % kGroup, column = begin * kBlock + i / kGroup * kLine;
    const Element* const line = static_cast<const Element*>(term.factor.data) + row * term.factor.row_stride + column;
    if (row < term.ranks && column < args.k) asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
  }
  if (args.starts_early) wait_for_previous_kernel();

  float sums[kTiles][4] = {};
  const int row = lane / 4;
  for (int block = begin + warp; block < end; block += kBatch * kWarps) {
    const auto column = [&](int i) { return (block + i * kWarps) * kBlock + lane % 4 * kPiece; };
    uint4 b[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) b[i] = vector(term.factor, first_rank + row, term.ranks, column(i));
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      uint4 low[kBatch], high[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        low[i] = vector(args.a, tile * kMmaM + row, args.m, column(i));
        high[i] = vector(args.a, tile * kMmaM + row + 8, args.m, column(i));
      }
      __syncwarp();  // or the compiler asks for a block when it has multiplied another
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        Mma<Element>::multiply(sums[tile], {low[i].x, high[i].x, low[i].y, high[i].y}, {b[i].x, b[i].y});
        Mma<Element>::multiply(sums[tile], {low[i].z, high[i].z, low[i].w, high[i].w}, {b[i].z, b[i].w});
      }
    }
  }
  const auto place = [](int warp, int token) { return (warp * kTiles * kMmaM + token) * kGroup; };
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      of_warps[place(warp, tile * kMmaM + row + i / 2 * 8) + lane % 4 * 2 + i % 2] = sums[tile][i];
    }
  }
  cta_sync();
  for (int i = threadIdx.x; i < args.m * kGroup; i += Gemm::Tile::kThreads) {
    const int token = i / kGroup, rank = i % kGroup;
    float sum = 0.0f;
#pragma unroll
    for (int source = 0; source < kWarps; ++source) sum += of_warps[place(source, token) + rank];
    term.sums[(part * args.m + token) * term.padded() + first_rank + rank] = term.scale * sum;
  }
  cta_sync();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(term.made, 1);
  }
}

// The term of eight adjacent columns of a token, when the rows are there.
template <typename Element>
__device__ __forceinline__ void rank_terms(const RankTerm& term, int tokens, int token, int column,
                                           float (&values)[kPiece]) {
  unsigned made;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(made) : "l"(term.made) : "memory");
  } while (made < static_cast<unsigned>(term.ctas()));
  const Element* const b = static_cast<const Element*>(term.b.data) + column * term.b.row_stride;
#pragma unroll
  for (int i = 0; i < kPiece; ++i) values[i] = 0.0f;
  for (int first = 0; first < term.ranks; first += kPiece) {
    float row[kPiece] = {};
    for (int part = 0; part < term.parts; ++part) {
      const float* const of_part = term.sums + (part * tokens + token) * term.padded() + first;
#pragma unroll
      for (int i = 0; i < kPiece; ++i) row[i] += __ldcg(of_part + i);
    }
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
      const Element* const of_column = b + i * term.b.row_stride + first;
      if (first + kPiece <= term.ranks) {
        const auto eight = *reinterpret_cast<const Packed<Element, kPiece>*>(of_column);
#pragma unroll
        for (int at = 0; at < kPiece; ++at) values[i] += row[at] * eight.lane(at);
      } else {
#pragma unroll
        for (int at = 0; at < kPiece; ++at) {
          if (first + at < term.ranks) values[i] += row[at] * to_float(of_column[at]);
        }
      }
    }
  }
}

}  // namespace fused_mlp::sm80
