// Products whose rows are grouped by weights, the experts of a mixture, by the main loops of dense products: a tile has
// rows of one expert, which are taken from where they lie. Rows of a tile that are not there are zeros, and are not
// read.
//
// With few rows the weights stream past them (streamed_gemm.cuh). For very few, nothing is sorted: every CTA finds the
// tiles in the index by itself. With more rows, tiles are those of the tiled loop, of which warps multiply the filled
// part alone; so are all tiles of weights [k, n].
#pragma once

#include "../../experts/rows/routes.cuh"
#include "../../gemm/grouped.h"
#include "../../loads.cuh"
#include "../dense/streamed_gemm.cuh"
#include "../dense/tiled_gemm.cuh"

namespace fused_mlp::sm80 {

struct GroupedOperands {
  Routes routes;
  FittedTiles fitted;       // none where CTAs search the index
  const int* token_of_row;  // where rows of a are those of tokens, and sorted; else null
  GateLimits limits;
  int64_t weight_stride;  // from an expert's weights to the next one's
  int64_t bias_stride, bias_step;
  int slots_of_row;
  int column_tiles;
  bool interleaved;
  bool follows_sort;
};

struct GroupedStreamedArgs : StreamedGemmArgs, GroupedOperands {};
struct GroupedTiledArgs : TiledGemmArgs, GroupedOperands {};

// The tiles of at most kSearchedSlots slots, in the order of their experts.
struct SearchedRows {
  int tiles;
  int codes[kSearchedSlots];  // a BlockCode of each
  int first[kSearchedSlots];  // of its rows
  int slots[kSearchedSlots];  // of every row

  // By all threads of the CTA; the first warp has a lane for each slot.
  __device__ __forceinline__ void find(const Routes& routes, int tile_rows) {
    static_assert(kSearchedSlots == 32);
    constexpr unsigned kAll = 0xFFFFFFFF;
    if (threadIdx.x < 32) {
      const int lane = threadIdx.x;
      const int mine = lane < routes.slots() ? expert_of(routes, lane) : -1;
      const unsigned alike = __match_any_sync(kAll, mine);
      const int before = __popc(alike & ((1u << lane) - 1));
      const bool begins = mine >= 0 && before % tile_rows == 0;
      int row = 0, tile = 0;
      for (int other = 0; other < 32; ++other) {
        const int expert = __shfl_sync(kAll, mine, other);
        const bool other_begins = __shfl_sync(kAll, begins, other);
        const bool earlier = expert >= 0 && (expert < mine || (expert == mine && other < lane));
        row += earlier;
        tile += earlier && other_begins;
      }
      if (mine >= 0) slots[row] = lane;
      if (begins) {
        codes[tile] = BlockCode::of(mine, min(tile_rows, __popc(alike) - before)).code;
        first[tile] = row;
      }
      const int count = __popc(__ballot_sync(kAll, begins));
      if (lane == 0) tiles = count;
    }
    __syncthreads();
  }
};

// The rows of an expert in a tile, and the operands that belong to it.
template <typename Gemm>
struct GroupedTile {
  using Element = typename Gemm::Element;
  const typename Gemm::Args& args;
  BlockCode code;
  int row;                     // the first
  int column;                  // the first
  const int* slots = nullptr;  // of rows, where these are not sorted

  __device__ __forceinline__ int tokens() const { return code.rows(); }
  __device__ __forceinline__ int64_t out_row(int at) const { return slots != nullptr ? slots[row + at] : row + at; }
  // A row past the end is the last one.
  __device__ __forceinline__ const Element* token_row(int at) const {
    const int sorted = row + min(at, code.rows() - 1);
    const int source = slots != nullptr               ? slots[sorted] / args.slots_of_row
                       : args.token_of_row != nullptr ? load_fresh(args.token_of_row + sorted)
                                                      : sorted;
    return static_cast<const Element*>(args.a.data) + source * args.a.row_stride;
  }
  __device__ __forceinline__ Matrix weight(Operand operand) const {
    Matrix matrix = operand == Operand::kUp ? args.up_weight : args.weight;
    matrix.data = const_cast<Element*>(static_cast<const Element*>(matrix.data)) + code.expert() * args.weight_stride;
    return matrix;
  }
  __device__ __forceinline__ const Element* weight_row(Operand operand, int at) const {
    return row_of<Element>(weight(operand), column + at, args.n);
  }
  __device__ __forceinline__ const void* bias(Operand operand) const {
    return operand == Operand::kUp ? args.epilogue.up_bias : args.epilogue.bias;
  }
  __device__ __forceinline__ bool is_biased(Operand operand) const { return bias(operand) != nullptr; }
  __device__ __forceinline__ float2 biases(Operand operand, int at) const {
    const Element* of_expert = static_cast<const Element*>(bias(operand)) + code.expert() * args.bias_stride;
    const int first = min(at, args.n - 2);  // past the end nothing is stored
    return make_float2(static_cast<float>(__ldg(of_expert + first * args.bias_step)),
                       static_cast<float>(__ldg(of_expert + (first + 1) * args.bias_step)));
  }
  __device__ __forceinline__ float bounded(Operand operand, float sum) const {
    return Gemm::kGated ? limited(args.limits, operand, sum) : sum;
  }
};

// The list is written while a kernel starts that follows the sort.
__device__ __forceinline__ FittedTile load_tile(const FittedTile* tile) {
  const int4 bits = load_fresh(reinterpret_cast<const int4*>(tile));
  return {{bits.x}, bits.y, bits.z, bits.w};
}

template <typename Element_, Product kProduct_, int kTokens_, int kColumns_, int kBlockK_, int kWarpsM_, int kWarpsK_,
          int kCtas_, int kStages_>
struct GroupedStreamed
    : StreamedGemm<Element_, kProduct_, kTokens_, kColumns_, kBlockK_, kWarpsM_, kWarpsK_, kCtas_, kStages_> {
  using Args = GroupedStreamedArgs;
  static_assert(GroupedStreamed::kSharedBytes + static_cast<int>(sizeof(SearchedRows)) <= kLeastSharedOfCta);
};

// Expert by expert; tiles that read the same weights are side by side.
template <typename Gemm>
struct GroupedStreamedTiles {
  const GroupedStreamedArgs& args;
  const SearchedRows& searched;
  int number;

  __device__ __forceinline__ int count() const { return number; }
  __device__ __forceinline__ GroupedTile<Gemm> at(int index) const {
    if (args.fitted.tiles == nullptr) {
      const int tile = index / args.column_tiles;
      return {args,
              {searched.codes[tile]},
              searched.first[tile],
              index % args.column_tiles * Gemm::kColumns,
              searched.slots};
    }
    FittedTile tile = load_tile(args.fitted.tiles + index / args.column_tiles);  // of the same expert
    const int in = index - tile.first * args.column_tiles, tiles_n = in / tile.count;
    if (tile.count > 1) tile = load_tile(args.fitted.tiles + tile.first + in % tile.count);
    return {args, tile.code, tile.row(), tiles_n * Gemm::kColumns};
  }
  __device__ __forceinline__ void prefetch(int) const {}
};

template <typename Gemm>
__global__ void __launch_bounds__(Gemm::Tile::kThreads, Gemm::kShape.ctas)
    grouped_streamed_kernel(const __grid_constant__ GroupedStreamedArgs args) {
  __shared__ SearchedRows searched;
  if (args.follows_sort) wait_for_previous_kernel();
  allow_next_kernel();  // which may read the lists: they are there
  const bool searches = args.fitted.tiles == nullptr;
  if (searches) searched.find(args.routes, Gemm::kTokens);
  const int tiles = searches ? searched.tiles : load_fresh(args.fitted.count);
  const GroupedStreamedTiles<Gemm> all{args, searched, tiles * args.column_tiles};
  if (static_cast<int>(blockIdx.x) < all.count()) stream<Gemm>(args, all);
  wait_for_previous_kernel();  // the kernel behind waits for this one alone
}

template <typename Element_, Product kProduct_, bool kTransposed_, int kBlockM_, int kBlockN_, int kBlockK_,
          int kWarpsM_, int kWarpsN_, int kStages_>
struct GroupedTiled : TiledGemm<Element_, kProduct_, kBlockM_, kBlockN_, kBlockK_, kWarpsM_, kWarpsN_, kStages_> {
  using Base = TiledGemm<Element_, kProduct_, kBlockM_, kBlockN_, kBlockK_, kWarpsM_, kWarpsN_, kStages_>;
  using Args = GroupedTiledArgs;
  using Tile = InTurns<CtaTile<Element_, kBlockM_, kBlockN_, kBlockK_, kWarpsM_, kWarpsN_, 1, kStages_, kTransposed_>>;
  static constexpr bool kGrouped = true;
  static_assert(!Base::kPersistent && Base::kSharedBytes <= kLeastSharedOfCta);

  // The copies of the tile's weights. Of weights [k, n] the columns of both operands are in one matrix: gates and ups
  // side by side, or in turns.
  __device__ __forceinline__ static auto weights(const Args& args, const GroupedTile<GroupedTiled>& tile) {
    if constexpr (kTransposed_) {
      using Loader = LyingLoader<Tile>;
      const int row = Loader::piece() * kPiece;
      int column = tile.column + Base::column(row);
      if (Base::kGated && args.interleaved) {
        column = min(2 * tile.column + row, 2 * args.n - kPiece);
      } else {
        column = min(column, args.n - kPiece) + (Base::operand(row) == Operand::kUp ? args.n : 0);
      }
      return Loader(tile.weight(Operand::kGate), column);
    } else {
      return SideLoader<Tile, Tile::kRowsN>(
          [&](int row) { return tile.weight_row(Base::operand(row), Base::column(row)); });
    }
  }
};

// Calls multiply with the number of each warp's tiles that so many rows fill, which is the same for all of the CTA:
// each has a main loop without branches.
template <typename Tile, int kCount = 1, typename Multiply>
__device__ __forceinline__ void visit_tiles(int rows, Multiply&& multiply) {
  if constexpr (kCount < Tile::kTilesM) {
    if (rows > kCount * Tile::kTileStepM) return visit_tiles<Tile, kCount + 1>(rows, multiply);
  }
  multiply.template operator()<kCount>();
}

template <typename Gemm>
__global__ void __launch_bounds__(Gemm::kThreads, Gemm::kCtasPerMultiprocessor)
    grouped_tiled_kernel(const __grid_constant__ GroupedTiledArgs args) {
  using Element = typename Gemm::Element;
  using Tile = typename Gemm::Tile;
  extern __shared__ __align__(128) uint8_t raw_shared[];
  wait_for_previous_kernel();
  allow_next_kernel();
  const int index = blockIdx.x;
  if (index >= load_fresh(args.fitted.count) * args.column_tiles) return;
  FittedTile fitted = load_tile(args.fitted.tiles + index / args.column_tiles);  // of the same expert
  const int2 at = grouped_tile<8>(index - fitted.first * args.column_tiles, fitted.count, args.column_tiles);
  if (fitted.count > 1) fitted = load_tile(args.fitted.tiles + fitted.first + at.x);
  const GroupedTile<Gemm> tile{args, fitted.code, fitted.row(), at.y * Gemm::kColumns};

  const uint32_t ring = shared_address(raw_shared);
  const uint32_t biases = ring + Tile::kShape.ring_bytes();
  const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);  // the compiler knows that all lanes have the same
  const WarpPlace<Tile> place(warp);
  for (int row = threadIdx.x * 2; row < Gemm::kRowsN; row += Gemm::kThreads * 2) {
    const Operand operand = Gemm::operand(row);
    const float2 pair =
        tile.is_biased(operand) ? tile.biases(operand, tile.column + Gemm::column(row)) : make_float2(0.0f, 0.0f);
    store_shared(biases + row * 2, round_pair<Element>(pair.x, pair.y));
  }
  const auto rows = SideLoader<Tile, Tile::kRowsM, true>([&](int row) { return tile.token_row(row); }, tile.tokens());
  auto weights = Gemm::weights(args, tile);
  fill<Tile>(ring, rows, weights, args.k);
  Accumulator<Tile> sums;
  clear<Tile>(sums);
  const int first = place.m * Tile::kWarpStepM;  // row of the warp
  visit_tiles<Tile>(tile.tokens(),
                    [&]<int kCount>() { multiply<Tile, kCount>(ring, rows, weights, place, args.k, sums); });
  const uint32_t store = ring + (Tile::kStages - 1) * Tile::kStageBytes + warp * Gemm::kStoreBytes;
  store_tile<Gemm>(args, sums, biases + place.n * Tile::kWarpRowsN * 2, store, tile.row + first,
                   tile.row + tile.tokens(), tile.column + place.n * Gemm::kWarpColumns);
}

}  // namespace fused_mlp::sm80
