// Sorts rows by their experts, for the grouped GEMMs: an expert's rows fill blocks of their own, so that no tile has
// rows of two experts. It takes one launch: every CTA counts the whole index, and copies the rows of its part of it.
#pragma once

#include "../../overlap.cuh"
#include "routes.cuh"

namespace fused_mlp {

constexpr int kSortThreads = 1024;
constexpr int kSortSlots = 128;  // maximum number of slots whose rows a CTA copies at a time
constexpr int kSortLoads = 8;    // slots that a thread loads at once to count them
constexpr int kSortChunks = 4;   // 16-byte chunks of a row that a thread copies at once

struct SortedRows {
  int next[kMaxGroupedExperts];   // first an expert's slots before the CTA's part, then the row of its next slot
  int rest[kMaxGroupedExperts];   // the expert's other slots
  int first[kMaxGroupedExperts];  // the expert's first row
  int rows[kSortSlots];
};

// Counts every expert's slots; those before `begin` are counted separately. All loads of a thread are in flight
// together.
template <typename Index>
__device__ __forceinline__ void count_slots(const Routes& routes, const Index* index, SortedRows& sorted, int begin) {
  const int slots = routes.slots();
  for (int first = threadIdx.x; first < slots; first += kSortLoads * kSortThreads) {
    Index numbers[kSortLoads];
#pragma unroll
    for (int i = 0; i < kSortLoads; ++i) {
      const int slot = first + i * kSortThreads;
      numbers[i] = slot < slots ? __ldg(index + slot) : Index{-1};
    }
#pragma unroll
    for (int i = 0; i < kSortLoads; ++i) {
      const int expert = expert_named(routes, numbers[i]);
      int* counts = first + i * kSortThreads < begin ? sorted.next : sorted.rest;
      if (expert >= 0) atomicAdd(counts + expert, 1);
    }
  }
}

// For a warp whose lanes have one slot each, in order: returns the next row of each lane's expert. Lanes with expert -1
// get none.
__device__ __forceinline__ int take_rows(int* next, int expert) {
  const unsigned alike = __match_any_sync(0xFFFFFFFF, expert);
  const int before = __popc(alike & ((1u << threadIdx.x % 32) - 1));
  const int first = expert >= 0 ? next[expert] : 0;
  __syncwarp();
  if (expert >= 0 && before == 0) next[expert] = first + __popc(alike);
  __syncwarp();
  return first + before;
}

// Divides an expert's rows into tiles. The taller tiles alternate between the first and the last ones, so that CTAs
// that take every other tile have equal work.
__device__ __forceinline__ void cut_tiles(FittedTile* tiles, int expert, int first_row, int rows, int first,
                                          int count) {
  const int end = first_row + rows;
  const int steps = (rows + kFittedStep - 1) / kFittedStep;
  for (int i = 0; i < count; ++i) {
    const int mine = steps / count + ((expert % 2 == 0 ? i : count - 1 - i) < steps % count ? 1 : 0);
    const int filled = min(end - first_row, mine * kFittedStep);
    tiles[first + i] = FittedTile::of(BlockCode::of(expert, filled), first, count, first_row, mine);
    first_row += mine * kFittedStep;
  }
}

// Called by one warp: turns counts before the CTA's part into rows and the other counts into totals, and has one CTA
// write the list of blocks.
__device__ __forceinline__ void place_experts(const RowSort& args, SortedRows& sorted) {
  const int block_rows = args.block_rows;
  int blocks = 0, tiles = 0;
  for (int begin = 0; begin < args.routes.experts; begin += 32) {
    const int expert = begin + static_cast<int>(threadIdx.x);
    const int slots = expert < args.routes.experts ? sorted.next[expert] + sorted.rest[expert] : 0;
    const int mine = (slots + block_rows - 1) / block_rows;
    const int last = sum_of_lanes(mine);
    const int first = blocks + last - mine;
    if (expert < args.routes.experts) {
      sorted.next[expert] += first * block_rows;
      sorted.rest[expert] = slots;
      sorted.first[expert] = first * block_rows;
    }
    if (args.tiles != nullptr) {
      const int count = (slots + args.tile_rows - 1) / args.tile_rows;
      const int end = sum_of_lanes(count);
      if (blockIdx.x == 0) cut_tiles(args.tiles, expert, first * block_rows, slots, tiles + end - count, count);
      tiles += __shfl_sync(0xFFFFFFFF, end, 31);
    }
    if (blockIdx.x == 0 && args.codes != nullptr) {
      for (int block = 0; block < mine; ++block) {
        const int rows = min(slots - block * block_rows, block_rows);
        args.codes[first + block] = BlockCode::of(expert, rows).code;
      }
    }
    blocks += __shfl_sync(0xFFFFFFFF, last, 31);
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    if (args.codes != nullptr) *args.count = blocks;
    if (args.tiles != nullptr) *args.tile_count = tiles;
    if (args.taken != nullptr) args.taken[0] = args.taken[1] = 0;
  }
}

// Copies the rows of the slots of a part. A warp reads a token's row once, kSortChunks columns of it per lane, and
// writes it for each of its slots.
__device__ __forceinline__ void copy_rows(const RowSort& args, const SortedRows& sorted, int begin, int end) {
  const int top_k = args.routes.top_k;
  const int chunks = static_cast<int>(args.k / 8);
  const int parts = (chunks + 32 * kSortChunks - 1) / (32 * kSortChunks);
  const int first_token = begin / top_k, tokens = (end - 1) / top_k - first_token + 1;
  for (int i = threadIdx.x / 32; i < tokens * parts; i += kSortThreads / 32) {
    const int token = first_token + i / parts;
    const int first = i % parts * 32 * kSortChunks + static_cast<int>(threadIdx.x % 32);
    const auto* from =
        reinterpret_cast<const uint4*>(static_cast<const char*>(args.x.data) + int64_t{token} * args.x.row_stride * 2);
    uint4 columns[kSortChunks];
#pragma unroll
    for (int j = 0; j < kSortChunks; ++j) {
      if (first + 32 * j < chunks) columns[j] = __ldg(from + first + 32 * j);
    }
    for (int slot = max(token * top_k, begin); slot < min((token + 1) * top_k, end); ++slot) {
      const int row = sorted.rows[slot - begin];
      if (row < 0) continue;
      auto* to = reinterpret_cast<uint4*>(static_cast<char*>(args.sorted) + int64_t{row} * args.k * 2);
#pragma unroll
      for (int j = 0; j < kSortChunks; ++j) {
        if (first + 32 * j < chunks) to[first + 32 * j] = columns[j];
      }
    }
  }
}

// Every CTA handles a few experts: it records their rows, and for training zeroes the rows that follow.
__device__ __forceinline__ void pad_experts(const RowSort& args, const SortedRows& sorted) {
  for (int expert = blockIdx.x; expert < args.routes.experts; expert += gridDim.x) {
    const int first = sorted.first[expert], count = sorted.rest[expert];
    if (threadIdx.x == 0 && args.rows != nullptr) args.rows[expert] = {first, count};
    if (args.token_of_row != nullptr && threadIdx.x < args.block_rows) {  // rows that are not filled get any token
      const int row = first + count + static_cast<int>(threadIdx.x);
      if (row < first + (count + args.block_rows - 1) / args.block_rows * args.block_rows) args.token_of_row[row] = 0;
    }
    if (args.training.row_weights == nullptr) continue;
    const int end = first + (count + kZeroRows - 1) / kZeroRows * kZeroRows;
    auto* rows = static_cast<uint4*>(args.sorted);
    const int64_t chunks = args.k / 8;
    for (int64_t i = (first + count) * chunks + threadIdx.x; i < end * chunks; i += kSortThreads) rows[i] = uint4{};
  }
}

__global__ void __launch_bounds__(kSortThreads) sorted_rows_kernel(const __grid_constant__ RowSort args) {
  __shared__ SortedRows sorted;
  const int slots = args.routes.slots();
  const int parts = (slots + args.part - 1) / args.part;
  const int begin = static_cast<int>(int64_t{blockIdx.x} * parts / gridDim.x) * args.part;
  const int end = min(static_cast<int>((int64_t{blockIdx.x} + 1) * parts / gridDim.x) * args.part, slots);
  allow_next_kernel();

  for (int i = threadIdx.x; i < args.routes.experts; i += kSortThreads) sorted.next[i] = sorted.rest[i] = 0;
  __syncthreads();
  visit_index(args.routes, [&](const auto* index) { count_slots(args.routes, index, sorted, begin); });
  __syncthreads();
  if (threadIdx.x < 32) place_experts(args, sorted);

  if (args.rows != nullptr || args.token_of_row != nullptr) {
    __syncthreads();
    pad_experts(args, sorted);
  }

  for (int part = begin; part < end; part += args.part) {
    const int count = min(args.part, end - part);
    __syncthreads();  // the rows of the last part have been read
    if (threadIdx.x < 32) {
      for (int i = static_cast<int>(threadIdx.x); i < args.part; i += 32) {
        const int expert = i < count ? expert_of(args.routes, part + i) : -1;
        const int row = take_rows(sorted.next, expert);
        sorted.rows[i] = expert < 0 ? -1 : row;
        if (i < count) args.row_of_slot[part + i] = sorted.rows[i];
        if (args.token_of_row != nullptr && expert >= 0) args.token_of_row[row] = (part + i) / args.routes.top_k;
        if (args.training.row_weights != nullptr && expert >= 0) {
          args.training.row_weights[row] = weight_of(args.training.weights, args.training.type, part + i);
        }
      }
    }
    __syncthreads();
    if (args.sorted != nullptr) copy_rows(args, sorted, part, part + count);
  }
}

}  // namespace fused_mlp
