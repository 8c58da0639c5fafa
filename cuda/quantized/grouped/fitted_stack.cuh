// The grouped product of many rows with MXFP4 weights, for Hopper: the fitted loop (../../sm90/dense/fitted_gemm.cuh),
// whose producer warps decode the weights of a stage while the tensor cores multiply the stage before. Decoded weights
// exist only in shared memory.
//
// Each warp has 32 weight rows of a tile, and a lane decodes a row. The warp copies codes a few units ahead of those
// that it decodes, also across tiles.
#pragma once

#include "../../sm80/ptx.cuh"
#include "../../sm90/dense/fitted_gemm.cuh"
#include "decode.cuh"

namespace fused_mlp {

struct FittedStackArgs {
  sm90::FittedGemmArgs gemm;  // without weights
  CodedStack weight;
  int row_step, up_row;  // distance between the weight rows of adjacent columns, and of a gate and its up
};

template <Product kProduct_>
struct FittedStack : sm90::FittedGemm<__nv_bfloat16, kProduct_> {
  using Fitted = sm90::FittedGemm<__nv_bfloat16, kProduct_>;
  using Decoder = StackDecoder<__nv_bfloat16, StackCoding::kMxfp4>;
  static constexpr bool kFences = true;
  static constexpr float kUnscale = Decoder::kUnscale;
  static constexpr int kStages = 4;
  static constexpr int kProducers = 128;
  static_assert(kProducers == Fitted::kWeightRows, "a lane has a row");
  static_assert(kProducers / 32 == sm90::kFittedBoxes, "a warp brings the rows of a box");
  static constexpr int kConsumerRegisters = 224, kProducerRegisters = 56;

  // A unit of codes is two blocks of k.
  static constexpr int kUnits = 5, kUnitBlocks = 2, kUnitK = kUnitBlocks * Fitted::kBlockK;
  static constexpr int kUnitRowBytes = kUnitK / 2, kPieces = kUnitRowBytes / 16;
  static constexpr int kCodeBytes = Fitted::kWeightRows * kUnitRowBytes, kScaleBytes = Fitted::kWeightRows * 8;
  static constexpr int kOperandBytes = Fitted::kFixedBytes + kStages * Fitted::kStageBytes;
  static constexpr int kSharedBytes = kOperandBytes + kUnits * (kCodeBytes + kScaleBytes);
  static_assert(kSharedBytes <= 227 * 1024);
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// The copies of the codes and scales of a warp's rows to shared memory.
template <typename Gemm>
struct StackUnits {
  static constexpr int kRowsOfPass = 32 / Gemm::kPieces, kPasses = 32 / kRowsOfPass;
  const FittedStackArgs& args;
  const int tiles, units;  // units per tile
  const uint32_t ring;     // for codes; the scales follow them
  int index, unit = 0;     // the next ones to copy: a tile, and a unit of it
  int slot = 0;            // the slot for them
  const uint8_t* codes;    // for the tile's expert
  int rows[kPasses];       // start of the lane's parts of rows
  int64_t scales;          // start of the scales of the lane's row

  __device__ __forceinline__ StackUnits(const FittedStackArgs& args, uint32_t ring, int tiles)
      : args(args),
        tiles(tiles),
        units((args.gemm.k_blocks + Gemm::kUnitBlocks - 1) / Gemm::kUnitBlocks),
        ring(ring),
        index(blockIdx.x) {
    aim();
  }

  // The weight row, within its expert, of a row of the tile.
  __device__ __forceinline__ int weight_row(const sm90::FittedPlace& tile, int row) const {
    const int column = tile.column + (Gemm::kGated ? row % Gemm::kTileN : row);
    const int up = Gemm::kGated && row >= Gemm::kTileN ? args.up_row : 0;
    return min(column, args.gemm.n - 1) * args.row_step + up;
  }

  __device__ __forceinline__ static int first_row() { return threadIdx.x % Gemm::kProducers / 32 * 32; }
  __device__ __forceinline__ uint32_t code_slot(int at) const { return ring + at * Gemm::kCodeBytes; }
  __device__ __forceinline__ uint32_t scale_slot(int at) const {
    return code_slot(Gemm::kUnits) + at * Gemm::kScaleBytes + threadIdx.x % Gemm::kProducers * 8;
  }

  __device__ __forceinline__ void aim() {
    if (index >= tiles) return;
    const sm90::FittedPlace tile = sm90::fitted_place<Gemm>(args.gemm, index);
    const int row_bytes = args.gemm.k_blocks * (Gemm::kBlockK / 2), lane = threadIdx.x % 32;
    codes = args.weight.data + tile.expert * args.weight.rows * row_bytes;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int row = first_row() + pass * kRowsOfPass + lane / Gemm::kPieces;
      rows[pass] = weight_row(tile, row) * row_bytes + lane % Gemm::kPieces * 16;
    }
    scales = scales_of(tile);
  }

  // The start of the scales of the lane's row of a tile, at any multiple of two bytes.
  __device__ __forceinline__ int64_t scales_of(const sm90::FittedPlace& tile) const {
    return tile.expert * args.weight.scales_of_expert +
           weight_row(tile, threadIdx.x % Gemm::kProducers) * args.weight.scale_stride;
  }

  // Starts the copies of the next unit. If there is no next unit, it commits an empty group.
  __device__ __forceinline__ void start() {
    if (index < tiles) {
      const int lane = threadIdx.x % 32, first = unit * Gemm::kUnitBlocks, piece = lane % Gemm::kPieces;
      const bool whole = first + 1 < args.gemm.k_blocks;
      const bool present = whole || piece < Gemm::kPieces / 2;
      const int offset = present ? unit * Gemm::kUnitRowBytes : 0;
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const int row = first_row() + pass * kRowsOfPass + lane / Gemm::kPieces;
        const int to = row * Gemm::kUnitRowBytes + Gemm::Decoder::template swizzled<Gemm::kPieces>(row, piece) * 16;
        sm90::copy_async(code_slot(slot) + to, codes + rows[pass] + offset, present ? 16 : 0);
      }
      // The words that hold the unit's four bytes: one if they start at a multiple of four, else two.
      const auto* const words = static_cast<const uint8_t*>(args.weight.scales) + (scales & -4) + unit * 4;
      sm90::copy_word_async(scale_slot(slot), words);
      if ((scales & 2) != 0 && whole) sm90::copy_word_async(scale_slot(slot) + 4, words + 4);
      slot = slot + 1 == Gemm::kUnits ? 0 : slot + 1;
      if (++unit == units) {
        unit = 0;
        index += gridDim.x;
        aim();
      }
    }
    sm80::cp_async_commit();
  }
};

// Run by Gemm::kProducers threads.
template <typename Gemm>
__device__ __forceinline__ void produce_decoded(const FittedStackArgs& args, const sm90::TiledGemmShared<Gemm>& shared,
                                                uint32_t ring, int tiles) {
  using Decoder = typename Gemm::Decoder;
  constexpr int kAhead = Gemm::kUnits - 1;
  const int row = threadIdx.x % Gemm::kProducers, box_rows = kFittedStep << row / 32;
  StackUnits<Gemm> copies(args, ring, tiles);
  for (int i = 0; i < kAhead; ++i) copies.start();
  if (args.gemm.starts_early) wait_for_previous_kernel();
  sm90::RingPosition at(Gemm::kStages);
  int slot = 0;
#pragma unroll 1
  for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
    const sm90::FittedPlace tile = sm90::fitted_place<Gemm>(args.gemm, index);
    const int scale_shift = static_cast<int>(copies.scales_of(tile) & 2) * 8;
    uint32_t scales = 0;
#pragma unroll 1
    for (int block = 0; block < args.gemm.k_blocks; ++block, at.advance()) {
      const int half = block % Gemm::kUnitBlocks;
      if (half == 0) {
        copies.start();
        sm80::cp_async_wait<kAhead>();
        __syncwarp();  // makes other lanes' copies visible
        const uint32_t words = copies.scale_slot(slot);
        scales = __funnelshift_r(sm80::load_shared(words), sm80::load_shared(words + 4), scale_shift);
      }
      const uint32_t from = copies.code_slot(slot) + row * Gemm::kUnitRowBytes;
      uint4 words[2];
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        words[part] =
            sm80::load_shared_uint4(from + Decoder::template swizzled<Gemm::kPieces>(row, half * 2 + part) * 16);
      }
      const uint32_t full = shared.full(at.stage);
      sm90::mbarrier_wait(shared.empty(at.stage), at.parity ^ 1);
      if (row % 32 == 0 && (tile.height & box_rows) != 0) {
        const int first = tile.height & -2 * box_rows;  // preceded by larger boxes
        sm90::mbarrier_expect(full, box_rows * Gemm::kRowBytes);
        sm90::tma_load(&args.gemm.a[row / 32], full, shared.a(at.stage) + first * Gemm::kRowBytes,
                       block * Gemm::kBlockK, tile.row + first);
      }
      const uint32_t both = Decoder::both_scales(scales);
      scales >>= 16;
      const uint32_t to = shared.b(at.stage) + row * Gemm::kRowBytes;
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const uint32_t of_part = Decoder::scales_of(both, part);
        const uint32_t word[4] = {words[part].x, words[part].y, words[part].z, words[part].w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // in the TMA's swizzle
          sm90::store_shared_uint4(to + ((part * 4 + i) ^ row % 8) * 16, Decoder::decode_word(word[i], of_part));
        }
      }
      // A fence for the tensor cores would wait for the copies in flight: the consumers execute it instead.
      __syncwarp();
      if (row % 32 == 0) sm90::mbarrier_arrive(full);
      if (half + 1 == Gemm::kUnitBlocks || block + 1 == args.gemm.k_blocks) {
        slot = slot + 1 == Gemm::kUnits ? 0 : slot + 1;
      }
    }
  }
  sm80::cp_async_wait<0>();
}

#endif

template <typename Gemm>
__global__ void __launch_bounds__(Gemm::kThreads, 1) fitted_stack_kernel(const __grid_constant__ FittedStackArgs args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ uint8_t raw_shared[];
  const sm90::TiledGemmShared<Gemm> shared(raw_shared);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Gemm::kStages; ++stage) {
      sm90::mbarrier_init(shared.full(stage), Gemm::kProducers / 32);
      sm90::mbarrier_init(shared.empty(stage), 4);  // one arrival per warp
    }
    sm90::fence_mbarrier_init();
  }
  __syncthreads();
  if (args.gemm.follows_sort) wait_for_previous_kernel();
  allow_next_kernel();  // it may read the tiles, which are written

  const int tiles = *args.gemm.fitted.count * args.gemm.tiles_n;
  if (threadIdx.x >= Gemm::kConsumers * 128) {
    sm90::shrink_registers<Gemm::kProducerRegisters>();
    produce_decoded<Gemm>(args, shared, shared.ring + Gemm::kOperandBytes - Gemm::kAlignment, tiles);
  } else {
    sm90::grow_registers<Gemm::kConsumerRegisters>();
    sm90::consume_fitted<Gemm>(args.gemm, shared, tiles);
  }
#endif
}

}  // namespace fused_mlp
