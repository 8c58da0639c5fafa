// Layers of one input as one tiled product: a tile is of one of them, whose weight, bias and output it has.
#pragma once

#include "../dense/tiled_gemm.cuh"

namespace fused_mlp::sm90 {

// Where a tile's column says of which layer it is, in the bits above this one.
constexpr int kColumnBits = 24;

// Those of the first layer, and of two others.
struct JointGemmArgs : TiledGemmArgs {
  TiledGemmArgs others[2];
  int all_tiles_n;

  __device__ __forceinline__ const TiledGemmArgs& of(int column) const {
    const int layer = column >> kColumnBits;
    return layer == 0 ? *this : others[layer - 1];
  }
  __device__ __forceinline__ static int in_layer(int column) { return column & ((1 << kColumnBits) - 1); }
};

template <typename Element, int kBlockN>
struct JointTiles : TiledGemm<Element, Product::kPlain, 128, kBlockN, Schedule::kPingPong, 1> {
  using OfLayer = TiledGemm<Element, Product::kPlain, 128, kBlockN, Schedule::kPingPong, 1>;
  using Args = JointGemmArgs;
  static constexpr bool kPair = true;  // without an activation, as a pair is
};

template <typename Element, int kBlockN>
constexpr bool kJoint<JointTiles<Element, kBlockN>> = true;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

struct JointTileOrder {
  const JointGemmArgs& args;

  __device__ __forceinline__ int count() const { return args.tiles_m * args.all_tiles_n; }

  template <typename Gemm>
  __device__ __forceinline__ Tile tile(int index) const {
    const int2 at = grouped_tile<TileOrder::kGroupM>(index, args.tiles_m, args.all_tiles_n);
    int layer = 0, tile_n = at.y;
    if (tile_n >= args.tiles_n) tile_n -= args.tiles_n, ++layer;
    if (layer > 0 && tile_n >= args.others[0].tiles_n) tile_n -= args.others[0].tiles_n, ++layer;
    const int last_column = args.of(layer << kColumnBits).last_column;
    return {min(at.x * Gemm::kBlockM, args.last_row), min(tile_n * Gemm::kTileN, last_column) | layer << kColumnBits};
  }
};

__device__ __forceinline__ JointTileOrder tile_order(const JointGemmArgs& args) { return {args}; }

template <typename Gemm>
  requires(kJoint<Gemm>)
struct TileBias<Gemm> {
  using OfLayer = TileBias<typename Gemm::OfLayer>;
  static constexpr int kThreads = OfLayer::kThreads;
  OfLayer of_layer;

  __device__ __forceinline__ void load(const JointGemmArgs& args, const Tile& tile, int column) {
    of_layer.load(args.of(column), tile, args.in_layer(column));
  }
  __device__ __forceinline__ void store(uint32_t shared) const { of_layer.store(shared); }
};

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace fused_mlp::sm90
