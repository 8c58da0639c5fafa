// The GEMM for many rows: a CTA computes one tile of the output. Rows of a are the M side of the products, weight rows
// the N side.
//
// A gated product is a plain one whose weight rows come from two tensors: of each warp's weight rows, the first half
// are gate rows and the second half the up rows of the same output columns. Sums j and j + kTilesN / 2 of a thread then
// belong to gate and up of one output element.
//
// Most kernels are small enough for two CTAs per multiprocessor, and one runs its epilogue while the other uses the
// tensor cores. The larger ones are persistent: they load the next tile's first blocks during the epilogue.
//
// The gradients of training, and the gradient of x, are products with weights in their own layout, [k, n].
#pragma once

#include "../../gemm/tile_order.cuh"
#include "../main_loop.cuh"
#include "../rows.cuh"
#include "gradient_store.cuh"
#include "tiled_store.cuh"

namespace fused_mlp::sm80 {

struct TiledGemmArgs {
  Matrix a;
  Matrix weight;
  Matrix up_weight;
  Matrix out;
  EpilogueArgs epilogue;
  TrainingMatrices training;
  int m;
  int n;
  int k;
  int tiles_m;
  int tiles_n;
};

template <typename Element_, Product kProduct_, int kBlockM_, int kBlockN_, int kBlockK_, int kWarpsM_, int kWarpsN_,
          int kStages_>
struct TiledGemm : CtaTile<Element_, kBlockM_, kBlockN_, kBlockK_, kWarpsM_, kWarpsN_, 1, kStages_,
                           reads_weights_as_they_lie(kProduct_)> {
  using Element = Element_;
  using Args = TiledGemmArgs;
  using Tile = CtaTile<Element_, kBlockM_, kBlockN_, kBlockK_, kWarpsM_, kWarpsN_, 1, kStages_,
                       reads_weights_as_they_lie(kProduct_)>;
  static constexpr bool kGrouped = false;
  static constexpr Product kProduct = kProduct_;
  static constexpr bool kGated = is_gated(kProduct);
  static constexpr int kParts = kGated ? 2 : 1;  // gate and up
  static constexpr bool kPersistent = is_persistent(Tile::kShape);
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kColumns = kBlockN_ / kParts;              // columns of the output, in a tile
  static constexpr int kWarpColumns = Tile::kWarpRowsN / kParts;  // columns that a warp computes
  static constexpr int kTilesOfPart = Tile::kTilesN / kParts;     // tiles of a warp, 8 columns each
  static constexpr int kStoreRowBytes = kWarpColumns * 2;         // bytes of a row of a warp's results in shared memory
  static constexpr int kStoreBytes = kMmaM * kStoreRowBytes;      // they use the memory of the ring's last stage
  static constexpr int kGradientStride = kWarpColumns + 8;        // floats; keeps a warp's lanes on distinct banks
  static constexpr int kGradientBytes = kMmaM * kGradientStride * 4;
  static constexpr int kSharedBytes = tiled_shared_bytes(Tile::kShape);
  static constexpr int kCtasPerMultiprocessor = kSharedBytes + kSystemBytes > kLeastSharedOfMultiprocessor / 2 ? 1 : 2;
  static_assert(Tile::kTilesN % kParts == 0);
  static_assert(Tile::kThreads / 32 * kStoreBytes <= Tile::kStageBytes);
  static_assert(!is_gradient(kProduct) ||
                (!kPersistent && Tile::kThreads / 32 * kGradientBytes <= Tile::kShape.ring_bytes()));

  // The weight, and the output column of the tile, that a weight row of the tile belongs to.
  __device__ __forceinline__ static Operand operand(int row) {
    return kGated && row / kWarpColumns % 2 == 1 ? Operand::kUp : Operand::kGate;
  }
  __device__ __forceinline__ static int column(int row) {
    return row / Tile::kWarpRowsN * kWarpColumns + row % kWarpColumns;
  }

  // The copies of the tile's weights: of `weight`, and in a gated product also of up's.
  __device__ __forceinline__ static auto weights(const Args& args, const Matrix& weight, int first_column) {
    if constexpr (Tile::kLies) {
      using Loader = LyingLoader<Tile>;  // columns past the end read the last ones
      return Loader(weight, min(first_column + Loader::piece() * kPiece, args.n - kPiece));
    } else {
      return SideLoader<Tile, Tile::kRowsN>([&](int row) {
        return row_of<Element>(operand(row) == Operand::kGate ? weight : args.up_weight, first_column + column(row),
                               args.n);
      });
    }
  }
};

// Starts the copies of the biases of the tile's weight rows. Without a bias they are zero.
template <typename Gemm>
__device__ __forceinline__ void load_biases(const TiledGemmArgs& args, uint32_t shared, int first_column) {
  using Element = typename Gemm::Element;
  for (int row = threadIdx.x * 2; row < Gemm::kRowsN; row += Gemm::kThreads * 2) {
    const void* bias = Gemm::operand(row) == Operand::kGate ? args.epilogue.bias : args.epilogue.up_bias;
    const uint32_t place = shared + row * 2;
    if (bias == nullptr) {
      store_shared(place, 0);
    } else {
      const int column = min(first_column + Gemm::column(row), args.n - 2);  // past the end nothing is stored
      cp_async_4(place, static_cast<const Element*>(bias) + column);
    }
  }
}

template <typename Gemm>
__global__ void __launch_bounds__(Gemm::kThreads, Gemm::kCtasPerMultiprocessor)
    tiled_gemm_kernel(const __grid_constant__ TiledGemmArgs args) {
  if constexpr (Gemm::kSharedBytes <= kSharedLimit) {
    using Element = typename Gemm::Element;
    using Tile = typename Gemm::Tile;
    constexpr int kBiasBytes = Gemm::kRowsN * 2;
    extern __shared__ __align__(128) uint8_t raw_shared[];
    const uint32_t ring = shared_address(raw_shared);
    uint32_t biases = ring + Tile::kShape.ring_bytes();
    const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);  // tells the compiler that all lanes agree
    const WarpPlace<Tile> place(warp);
    int index = blockIdx.x;
    int2 tile = grouped_tile<8>(index, args.tiles_m, args.tiles_n);
    const auto rows_of = [&](const Matrix& a) {
      return SideLoader<Tile, Tile::kRowsM>(
          [&](int row) { return row_of<Element>(a, tile.x * Gemm::kBlockM + row, args.m); });
    };

    load_biases<Gemm>(args, biases, tile.y * Gemm::kColumns);
    auto rows = rows_of(args.a);
    auto weights = Gemm::weights(args, args.weight, tile.y * Gemm::kColumns);
    fill<Tile>(ring, rows, weights, args.k);
#pragma unroll 1
    while (true) {
      Accumulator<Tile> sums;
      clear<Tile>(sums);
      multiply<Tile>(ring, rows, weights, place, args.k, sums);
      if constexpr (Gemm::kProduct == Product::kPair) {
        rows = rows_of(args.training.second_a);
        weights = Gemm::weights(args, args.training.second_weight, tile.y * Gemm::kColumns);
        fill<Tile>(ring, rows, weights, args.k);
        multiply<Tile>(ring, rows, weights, place, args.k, sums);
      }
      const int first_row = tile.x * Gemm::kBlockM + place.m * Tile::kWarpRowsM;
      const int first_column = tile.y * Gemm::kColumns + place.n * Gemm::kWarpColumns;
      const uint32_t warp_biases = biases + place.n * Tile::kWarpRowsN * 2;
      index += gridDim.x;
      const bool more = Gemm::kPersistent && index < args.tiles_m * args.tiles_n;
      if (more) {  // its first blocks are loaded while this tile is stored, in the memory of the ring's last stage
        tile = grouped_tile<8>(index, args.tiles_m, args.tiles_n);
        biases = biases == ring + Tile::kShape.ring_bytes() ? biases + kBiasBytes : biases - kBiasBytes;
        load_biases<Gemm>(args, biases, tile.y * Gemm::kColumns);
        rows = rows_of(args.a);
        weights = Gemm::weights(args, args.weight, tile.y * Gemm::kColumns);
        fill<Tile>(ring, rows, weights, args.k);
      }
      if constexpr (is_gradient(Gemm::kProduct)) {
        store_gradients<Gemm>(args, sums, ring + warp * Gemm::kGradientBytes, first_row, first_column);
      } else {
        const uint32_t store = ring + (Tile::kStages - 1) * Tile::kStageBytes + warp * Gemm::kStoreBytes;
        store_tile<Gemm>(args, sums, warp_biases, store, first_row, args.m, first_column);
      }
      if (!more) break;
    }
  } else {
    __trap();  // rather than leave the output unwritten
  }
}

}  // namespace fused_mlp::sm80
