// Grouped products with quantised weights, the experts of a mixture. A tile has rows of one expert, which are read from
// their original places, and codes pass through shared memory once per tile.
//
// Weight rows are the M side of the products and rows of a (tokens) the N side, as in the streamed GEMM of quantised
// weights (../streamed/gemm.cuh), which has the same order of k. CTAs are persistent, and copies run ahead into the
// next tile. Scales are loaded into registers one stage ahead. Warps share k, and their sums are added in the order of
// the warps.
#pragma once

#include "../../overlap.cuh"
#include "../../sm80/grouped/grouped.cuh"
#include "decode.cuh"

namespace fused_mlp {

struct StackArgs {
  Matrix a;
  CodedStack weight;
  Matrix out;
  EpilogueArgs epilogue;
  Routes routes;
  FittedTiles fitted;       // none if CTAs search the index
  const int* token_of_row;  // if rows of a are tokens, and sorted; else null
  GateLimits limits;
  int64_t bias_stride, bias_step;
  int n, k;
  int row_step, up_row;  // distance between the weight rows of adjacent columns, and of a gate and its up
  int slots_of_row;
  int column_tiles;
  bool float_bias;
  bool follows_sort, starts_early;
};

template <typename Element_, StackKernel kKernel_>
struct StackGemm {
  using Element = Element_;
  static constexpr StackKernel kKernel = kKernel_;
  using Decoder = StackDecoder<Element, kKernel.coding>;
  static constexpr bool kGated = kKernel.gated;
  static constexpr Product kProduct = kGated ? Product::kGated : Product::kPlain;
  static constexpr int kTokens = kKernel.tokens, kTilesN = kTokens / 8, kRound = kKernel.round();
  static constexpr int kWarpsM = kKernel.warps_m, kWarpsK = kKernel.warps_k;
  static constexpr int kTilesM = kKernel.tiles_m, kSteps = kKernel.steps, kStages = kKernel.stages;
  static constexpr int kThreads = kKernel.threads();
  static constexpr bool kApart = kWarpsM == 1;  // no warp reads what another one copies
  static constexpr int kRows = kKernel.rows(), kColumns = kKernel.columns();
  static constexpr int kBlocks = kKernel.blocks(), kBlockK = kKernel.block_k();
  static constexpr int kRowBytes = kKernel.row_bytes(), kPieces = kRowBytes / 16;
  static constexpr int kTokenBytes = kBlockK * 2, kTokensOffset = kKernel.tokens_offset();
  static constexpr int kStageBytes = kKernel.stage_bytes(), kSumStride = kKernel.sum_stride();
  static_assert(kKernel.shared_bytes() + static_cast<int>(sizeof(sm80::SearchedRows)) <= sm80::kLeastSharedOfCta);

  // The weight row of an expert for row `row` of a tile. Eight gate rows precede the up rows of the same columns, so
  // that one lane has both. Rows past the end read the last column.
  static __device__ __forceinline__ int weight_row(const StackArgs& args, int first_column, int row) {
    const int up = kGated ? row / 8 % 2 : 0;
    const int column = first_column + (kGated ? row / 16 * 8 + row % 8 : row);
    return min(column, args.n - 1) * args.row_step + up * args.up_row;
  }
};

// Rows of an expert, and columns of its weights.
struct StackTile {
  BlockCode code;
  int row, column;   // the first ones
  const int* slots;  // of rows, if these are not sorted
};

// Expert by expert; tiles that read the same weights are adjacent.
template <typename Gemm>
struct StackTiles {
  const StackArgs& args;
  const sm80::SearchedRows& searched;
  int count;

  __device__ __forceinline__ StackTile at(int index) const {
    if (args.fitted.tiles == nullptr) {
      const int tile = index / args.column_tiles, column = index % args.column_tiles * Gemm::kColumns;
      return {{searched.codes[tile]}, searched.first[tile], column, searched.slots};
    }
    FittedTile tile = sm80::load_tile(args.fitted.tiles + index / args.column_tiles);  // tiles of the same expert
    const int in = index - tile.first * args.column_tiles, column = in / tile.count * Gemm::kColumns;
    if (tile.count > 1) tile = sm80::load_tile(args.fitted.tiles + tile.first + in % tile.count);
    return {tile.code, tile.row(), column, nullptr};
  }
};

// The copies of a CTA, which run ahead of its products into the next tile.
template <typename Gemm>
struct GroupCopies {
  using Element = typename Gemm::Element;
  // A warp that is apart copies its own blocks of k, and does not wait for others.
  static constexpr int kThreads = Gemm::kApart ? 32 : Gemm::kThreads, kSharing = Gemm::kApart ? Gemm::kWarpsK : 1;
  static constexpr int kPieces = Gemm::kPieces / kSharing;
  static constexpr int kRowsOfPass = kThreads / kPieces, kPasses = Gemm::kRows / kRowsOfPass;
  static constexpr int kTokenPieces = Gemm::kTokenBytes / 16 / kSharing;
  static constexpr int kTokenPasses = Gemm::kTokens * kTokenPieces / kThreads;
  static_assert(Gemm::kRows % kRowsOfPass == 0 && kRowsOfPass % 8 == 0 && Gemm::kTokens * kTokenPieces % kThreads == 0);

  const StackArgs& args;
  const StackTiles<Gemm>& tiles;
  static __device__ __forceinline__ int thread() { return threadIdx.x % kThreads; }
  // The piece of a row of a stage that an item copies.
  static __device__ __forceinline__ int piece_of(int item, int pieces) {
    return item % pieces + (Gemm::kApart ? threadIdx.x / 32 * pieces : 0);
  }

  int tile, block;
  const uint8_t* weights;               // for the tile's expert
  int rows[kPasses];                    // start of this thread's rows of them
  const Element* tokens[kTokenPasses];  // null if there is no such token

  __device__ __forceinline__ GroupCopies(const StackArgs& args, const StackTiles<Gemm>& tiles)
      : args(args), tiles(tiles), tile(blockIdx.x), block(0) {
    aim();
  }

  __device__ __forceinline__ void aim() {
    if (tile >= tiles.count) return;
    const StackTile at = tiles.at(tile);
    const int row_bytes = args.k / kCodedBlock * unit_bytes(Gemm::kKernel.coding);
    weights = args.weight.data + at.code.expert() * args.weight.rows * row_bytes;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int row = Gemm::weight_row(args, at.column, pass * kRowsOfPass + thread() / kPieces);
      rows[pass] = row * row_bytes + piece_of(thread(), kPieces) * 16;
    }
#pragma unroll
    for (int pass = 0; pass < kTokenPasses; ++pass) {
      const int index = pass * kThreads + thread(), token = index / kTokenPieces;
      tokens[pass] =
          token < at.code.rows() ? token_row(at, at.row + token) + piece_of(index, kTokenPieces) * 8 : nullptr;
    }
  }

  __device__ __forceinline__ const Element* token_row(const StackTile& at, int sorted) const {
    const int source = at.slots != nullptr            ? at.slots[sorted] / args.slots_of_row
                       : args.token_of_row != nullptr ? load_fresh(args.token_of_row + sorted)
                                                      : sorted;
    return static_cast<const Element*>(args.a.data) + source * args.a.row_stride;
  }

  __device__ __forceinline__ void load_weights(uint32_t stage) const {
    constexpr int kUnit = unit_bytes(Gemm::kKernel.coding), kOfUnit = kUnit / 16;
    const int first = block * Gemm::kBlockK, row = thread() / kPieces, piece = piece_of(thread(), kPieces);
    const uint32_t shared =
        stage + row * Gemm::kRowBytes + Gemm::Decoder::template swizzled<Gemm::kPieces>(row, piece) * 16;
    const bool present = first + piece / kOfUnit * kCodedBlock < args.k;
    const int offset = present ? block * Gemm::kRowBytes : 0;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      sm80::cp_async_16(shared + pass * kRowsOfPass * Gemm::kRowBytes, weights + (rows[pass] + offset), present);
    }
  }

  // The values in rows past the last token do not matter: their sums are not stored.
  __device__ __forceinline__ void load_tokens(uint32_t stage) const {
    const int first = block * Gemm::kBlockK;
#pragma unroll
    for (int pass = 0; pass < kTokenPasses; ++pass) {
      if (tokens[pass] == nullptr) continue;
      const int index = pass * kThreads + thread(), row = index / kTokenPieces;
      const int piece = piece_of(index, kTokenPieces);
      const bool present = first + piece * 8 < args.k;
      sm80::cp_async_16(
          stage + Gemm::kTokensOffset + row * Gemm::kTokenBytes + Gemm::Decoder::swizzled_tokens(row, piece) * 16,
          tokens[pass] + (present ? first : 0), present);
    }
  }

  __device__ __forceinline__ void advance() {
    if (++block * Gemm::kBlockK < args.k) return;
    block = 0;
    tile += gridDim.x;
    aim();
  }

  // If there is no next block, it commits an empty group, so that the number of groups after a block's is always the
  // same.
  __device__ __forceinline__ void start(uint32_t stage) {
    if (tile < tiles.count) {
      load_weights(stage);
      load_tokens(stage);
      advance();
    }
    sm80::cp_async_commit();
  }

  // Starts the copies of the first blocks, for all stages but one. Only weights are read until the kernel that writes a
  // is done.
  __device__ __forceinline__ void fill(uint32_t ring) {
    GroupCopies ahead = *this;
#pragma unroll 1
    for (int stage = 0; stage < Gemm::kStages - 1 && ahead.tile < tiles.count; ++stage) {
      ahead.load_weights(ring + stage * Gemm::kStageBytes);
      ahead.advance();
    }
    if (args.starts_early) wait_for_previous_kernel();
#pragma unroll 1
    for (int stage = 0; stage < Gemm::kStages - 1; ++stage) {
      if (tile < tiles.count) {
        load_tokens(ring + stage * Gemm::kStageBytes);
        advance();
      }
      sm80::cp_async_commit();
    }
  }
};

// The position of a thread in the products. `row` is its weight row, and its row of a, modulo eight.
template <typename Gemm>
struct StackLane {
  const int warp_m, warp_k, row, quarter;
  __device__ __forceinline__ StackLane()
      : warp_m(threadIdx.x / 32 % Gemm::kWarpsM),
        warp_k(threadIdx.x / 32 / Gemm::kWarpsM),
        row(threadIdx.x % 32 / 4),
        quarter(threadIdx.x % 4) {}

  // A row of the CTA's tile, in tile `i` of the warp: the lane's row, or the one 8 below it.
  __device__ __forceinline__ int tile_row(int i, int half) const {
    return (warp_m * Gemm::kTilesM + i) * 16 + half * 8 + row;
  }
  __device__ __forceinline__ int block(int step) const { return warp_k * Gemm::kSteps + step; }
};

// The scales of a warp's rows, read one stage ahead: each of a row's four lanes reads some of those that they need.
template <typename Gemm>
struct StackScales {
  using Decoder = typename Gemm::Decoder;
  static constexpr int kOfLane = (Gemm::kTilesM + 1) / 2;
  using Scale = typename Decoder::Scale;
  using Ready = Scale[Gemm::kSteps][kOfLane];

  const StackArgs& args;
  const StackTiles<Gemm>& tiles;
  const StackLane<Gemm>& lane;
  int tile, block;
  int at[kOfLane];
  typename Decoder::RawScales next[Gemm::kSteps][kOfLane];

  __device__ __forceinline__ StackScales(const StackArgs& args, const StackTiles<Gemm>& tiles,
                                         const StackLane<Gemm>& lane)
      : args(args), tiles(tiles), lane(lane), tile(blockIdx.x), block(0) {
    aim();
    load();
  }

  __device__ __forceinline__ void aim() {
    const StackTile place = tiles.at(tile);
#pragma unroll
    for (int own = 0; own < kOfLane; ++own) {
      const int part = (own * 4 + lane.quarter) % (2 * Gemm::kTilesM);
      const int row = Gemm::weight_row(args, place.column, lane.tile_row(part / 2, part % 2));
      const int scale_row = Gemm::kKernel.coding == StackCoding::kMxfp4 ? row : row / args.weight.scale_rows;
      at[own] =
          static_cast<int>(place.code.expert() * args.weight.scales_of_expert + scale_row * args.weight.scale_stride);
    }
  }

  // Past the end of k it reads the last block's scales; the codes there are zero.
  __device__ __forceinline__ void load() {
#pragma unroll
    for (int step = 0; step < Gemm::kSteps; ++step) {
      const int place = min(block * Gemm::kBlocks + lane.block(step), args.k / kCodedBlock - 1);
#pragma unroll
      for (int own = 0; own < kOfLane; ++own) next[step][own] = Decoder::load(args.weight, at[own], place);
    }
  }

  // Returns the scales of this stage, and starts loading the next one's.
  __device__ __forceinline__ void take(Ready& current) {
#pragma unroll
    for (int step = 0; step < Gemm::kSteps; ++step) {
#pragma unroll
      for (int own = 0; own < kOfLane; ++own) current[step][own] = Decoder::ready(next[step][own]);
    }
    if (++block * Gemm::kBlockK >= args.k) {
      block = 0;
      tile += gridDim.x;
      if (tile >= tiles.count) return;
      aim();
    }
    load();
  }

  // The scale of the lane's row in a half of a tile.
  static __device__ __forceinline__ Scale of(const Scale (&ready)[kOfLane], int i, int half) {
    const int part = i * 2 + half;
    return __shfl_sync(0xFFFFFFFF, ready[part / 4], part % 4, 4);
  }
};

template <typename Gemm>
using StackSums = float[Gemm::kTilesM][Gemm::kTilesN][4];

// sums += scale * (codes a^T) of a block of 64, for the first `filled` groups of 8 tokens.
template <typename Gemm, typename Scales>
__device__ __forceinline__ void multiply_block(StackSums<Gemm>& sums, const uint8_t* stage, const StackLane<Gemm>& lane,
                                               int block, const Scales& scales, int filled) {
  using Decoder = typename Gemm::Decoder;
  using Mma = sm80::Mma<typename Gemm::Element>;
  uint32_t codes[Gemm::kTilesM][4][4];
  [[maybe_unused]] typename Decoder::Scale of_rows[Gemm::kTilesM][2];
#pragma unroll
  for (int i = 0; i < Gemm::kTilesM; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t pairs[8];
      of_rows[i][half] = StackScales<Gemm>::of(scales, i, half);
      const uint8_t* const row = stage + lane.tile_row(i, half) * Gemm::kRowBytes;
      Decoder::template decode<Gemm::kPieces>(pairs, row, lane.row, block, lane.quarter, of_rows[i][half]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        codes[i][j][half] = pairs[2 * j];
        codes[i][j][half + 2] = pairs[2 * j + 1];
      }
    }
  }
#pragma unroll
  for (int n = 0; n < Gemm::kTilesN; ++n) {
    if (n > 0 && n >= filled) break;
    uint32_t tokens[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint8_t* const row = stage + Gemm::kTokensOffset + (n * 8 + lane.row) * Gemm::kTokenBytes;
      const int piece = Decoder::swizzled_tokens(lane.row, block * 8 + Decoder::element(lane.quarter, half) / 8);
      const uint4 words = *reinterpret_cast<const uint4*>(row + piece * 16);
      tokens[half][0] = words.x, tokens[half][1] = words.y, tokens[half][2] = words.z, tokens[half][3] = words.w;
      Decoder::order(tokens[half]);
    }
    [[maybe_unused]] float of_block[Gemm::kTilesM][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t pair[2] = {tokens[j / 2][j % 2 * 2], tokens[j / 2][j % 2 * 2 + 1]};
#pragma unroll
      for (int i = 0; i < Gemm::kTilesM; ++i) {
        if constexpr (!Decoder::kScalesSums) {
          Mma::multiply(sums[i][n], codes[i][j], pair);
        } else if (j == 0) {
          Mma::set(of_block[i], codes[i][j], pair);
        } else {
          Mma::multiply(of_block[i], codes[i][j], pair);
        }
      }
    }
    if constexpr (Decoder::kScalesSums) {
#pragma unroll
      for (int i = 0; i < Gemm::kTilesM; ++i) {
#pragma unroll
        for (int c = 0; c < 4; ++c) sums[i][n][c] = fmaf(of_block[i][c], of_rows[i][c / 2], sums[i][n][c]);
      }
    }
  }
}

// The sums of warps in shared memory, each [token, row], for kRound tokens at a time.
template <typename Gemm>
struct StackParts {
  float* const all;

  __device__ __forceinline__ float* of(int warp_k, int token) const {
    return all + (warp_k * Gemm::kRound + token) * Gemm::kSumStride;
  }
  __device__ __forceinline__ void put(const StackSums<Gemm>& sums, const StackLane<Gemm>& lane, int round) const {
#pragma unroll
    for (int i = 0; i < Gemm::kTilesM; ++i) {
#pragma unroll
      for (int n = 0; n < Gemm::kTilesN; ++n) {
        if (n / (Gemm::kRound / 8) != round) continue;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int token = n % (Gemm::kRound / 8) * 8 + lane.quarter * 2 + c % 2;
          of(lane.warp_k, token)[lane.tile_row(i, c / 2)] = sums[i][n][c];
        }
      }
    }
  }
  __device__ __forceinline__ float sum(int token, int row) const {
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < Gemm::kWarpsK; ++warp) sum += of(warp, token)[row];
    return sum * Gemm::Decoder::kUnscale;
  }
};

template <typename Element>
__device__ __forceinline__ float bias_at(const StackArgs& args, const void* bias, int expert, int column) {
  if (bias == nullptr) return 0.0f;
  const int64_t at = expert * args.bias_stride + column * args.bias_step;
  return args.float_bias ? __ldg(static_cast<const float*>(bias) + at)
                         : static_cast<float>(__ldg(static_cast<const Element*>(bias) + at));
}

// Stores the results of a round: each thread finishes some elements.
template <typename Gemm>
__device__ __forceinline__ void store_round(const StackArgs& args, const StackParts<Gemm>& parts, const StackTile& tile,
                                            int first) {
  using Element = typename Gemm::Element;
  const CodedActivation<Element> activate{args.epilogue.activation};
  const int items = Gemm::kColumns * min(Gemm::kRound, tile.code.rows() - first);
  for (int item = threadIdx.x; item < items; item += Gemm::kThreads) {
    const int local = item % Gemm::kColumns, token = item / Gemm::kColumns, column = tile.column + local;
    if (column >= args.n) continue;
    float value[1];
    GluEpilogue<Gemm::kProduct>::apply(value, activate, [&](Operand operand, auto&& take) {
      const bool up = operand == Operand::kUp;
      const int row = Gemm::kGated ? local / 8 * 16 + local % 8 + up * 8 : local;
      const void* const bias = up ? args.epilogue.up_bias : args.epilogue.bias;
      const float sum = parts.sum(token, row) + bias_at<Element>(args, bias, tile.code.expert(), column);
      take(0, Gemm::kGated ? limited(args.limits, operand, sum) : sum);
    });
    const int sorted = tile.row + first + token;
    const int64_t to = tile.slots != nullptr ? tile.slots[sorted] : sorted;
    static_cast<Element*>(args.out.data)[to * args.out.row_stride + column] = from_float<Element>(value[0]);
  }
}

// Computes every gridDim.x-th tile, starting at the CTA's index; there is at least one.
template <typename Gemm>
__device__ __forceinline__ void multiply_stack(const StackArgs& args, const StackTiles<Gemm>& tiles) {
  extern __shared__ __align__(128) uint8_t raw_shared[];
  const uint32_t ring = sm80::shared_address(raw_shared);
  const StackLane<Gemm> lane;
  const StackParts<Gemm> parts{reinterpret_cast<float*>(raw_shared + Gemm::kKernel.ring_bytes())};
  const auto after = [](int stage) { return stage + 1 == Gemm::kStages ? 0 : stage + 1; };
  StackScales<Gemm> scales(args, tiles, lane);
  GroupCopies<Gemm> copies(args, tiles);
  copies.fill(ring);
  int reading = 0, writing = Gemm::kStages - 1;
#pragma unroll 1
  for (int index = blockIdx.x; index < tiles.count; index += gridDim.x) {
    StackSums<Gemm> sums = {};
    const StackTile tile = tiles.at(index);
    const int filled = (tile.code.rows() + 7) / 8;
#pragma unroll 1
    for (int begin = 0; begin < args.k; begin += Gemm::kBlockK) {
      sm80::cp_async_wait<Gemm::kStages - 2>();
      // The block has arrived, and all warps are done with the one before it.
      if constexpr (Gemm::kApart) {
        __syncwarp();
      } else {
        __syncthreads();
      }
      copies.start(ring + writing * Gemm::kStageBytes);
      writing = after(writing);
      typename StackScales<Gemm>::Ready ready;
      scales.take(ready);
#pragma unroll
      for (int step = 0; step < Gemm::kSteps; ++step) {
        multiply_block<Gemm>(sums, raw_shared + reading * Gemm::kStageBytes, lane, lane.block(step), ready[step],
                             filled);
      }
      reading = after(reading);
    }
#pragma unroll
    for (int round = 0; round < Gemm::kTokens / Gemm::kRound; ++round) {
      const int first = round * Gemm::kRound;
      if (first >= tile.code.rows()) break;
      if (round > 0 || Gemm::kApart) __syncthreads();  // the previous sums have been read
      parts.put(sums, lane, round);
      __syncthreads();
      store_round<Gemm>(args, parts, tile, first);
    }
  }
  sm80::cp_async_wait<0>();
}

template <typename Gemm>
__global__ void __launch_bounds__(Gemm::kThreads, Gemm::kKernel.ctas)
    stack_gemm_kernel(const __grid_constant__ StackArgs args) {
  __shared__ sm80::SearchedRows searched;
  if (args.follows_sort) wait_for_previous_kernel();
  allow_next_kernel();  // it may read the lists, which are written
  const bool searches = args.fitted.tiles == nullptr;
  if (searches) searched.find(args.routes, Gemm::kTokens);
  const int tiles = searches ? searched.tiles : load_fresh(args.fitted.count);
  const StackTiles<Gemm> all{args, searched, tiles * args.column_tiles};
  if (static_cast<int>(blockIdx.x) < all.count) multiply_stack<Gemm>(args, all);
  wait_for_previous_kernel();  // the next kernel only waits for this one
}

}  // namespace fused_mlp
