// The GEMM for rows grouped by weights, for many rows: the experts of a mixture. An expert's rows are divided into
// tiles of nearly equal height, any multiple of 16 (sorted_rows.cuh), so that few unnecessary rows are computed. For
// that the operands are swapped: 128 weight rows are the M sides of two wgmmas, and a tile's rows are their N side.
//
// A CTA is persistent, with two consumer warpgroups in ping-pong, as in the tiled loop. In a gated product the first
// wgmma has gate rows and the second the up rows of the same 64 columns of the output.
#pragma once

#include "../../gemm/grouped.h"
#include "../../gemm/tile_order.cuh"
#include "../../overlap.cuh"
#include "../ring.cuh"
#include "../wgmma.cuh"
#include "tiled_layout.cuh"
#include "tiled_store.cuh"

namespace fused_mlp::sm90 {

// Boxes have 16, 32, 64 and 128 rows. The bits set in a tile's height select the boxes that load its rows.
constexpr int kFittedBoxes = 4;

struct FittedGemmArgs {
  CUtensorMap a[kFittedBoxes];
  CUtensorMap weight;
  CUtensorMap up_weight;
  CUtensorMap out;
  CUtensorMap gate;  // where values before the activation are kept
  CUtensorMap up;
  CUtensorMap rank_rows[kFittedBoxes];  // for the low-rank term, like a; not if rows are gathered
  CUtensorMap rank_weight;
  CUtensorMap rank_up_weight;
  RowGather gather;  // replaces a
  EpilogueArgs epilogue;
  GateLimits limits;
  FittedTiles fitted;
  int n;
  int k_blocks;         // of all operands
  int own_blocks;       // of a and the weights, without those of the low-rank term
  int blocks_together;  // requested one right after the other
  int last_column;      // the last column at which a tile may start
  int tiles_n;
  int weight_rows;
  int rank_weight_rows;
  int64_t bias_stride;
  int64_t bias_step;
  bool follows_sort;  // starts before the kernel that writes the tiles is done
  bool starts_early;  // starts before the kernel that writes a is done
  bool reads_once;    // no other tile reads the same weights
  bool float_bias;    // biases are float; else they have the dtype of a
};

template <typename Element_, Product kProduct_, bool kGathers_ = false>
struct FittedGemm {
  using Element = Element_;
  using Args = FittedGemmArgs;
  static constexpr Product kProduct = kProduct_;
  static constexpr bool kGated = is_gated(kProduct);
  static constexpr bool kKept = is_kept(kProduct);
  static constexpr bool kOuter = false;
  static constexpr bool kGathers = kGathers_;  // rows of a are tokens, in their original places
  static constexpr bool kFences = kGathers;    // threads write to stages, too
  static constexpr float kUnscale = 1.0f;      // the factor for the sums
  static constexpr int kBlockK = sm90::kBlockK;
  static constexpr int kWeightRows = 128;
  static constexpr int kMmas = 2;
  static constexpr int kOutputs = kGated ? 1 : 2;  // wgmmas that have columns of the output of their own
  static constexpr int kTileN = kOutputs * 64;     // columns of the output
  static constexpr int kAccumulators = kMostFittedRows / 2;
  static constexpr int kConsumers = 2;
  static constexpr int kConsumersOfTile = 1;
  static constexpr int kThreads = (kConsumers + 1) * 128;

  // Results are stored in boxes of a warp's 16 columns and 16 rows. The code of the epilogue covers a chunk of rows.
  static constexpr int kStepN = 16, kBoxN = 16, kBoxRows = 16;
  static constexpr int kChunk = 96;
  static constexpr int kRowBytes = kBlockK * sizeof(Element);
  static constexpr int kBytesA = kMostFittedRows * kRowBytes;
  static constexpr int kBytesB = kWeightRows * kRowBytes;
  static constexpr int kStageBytes = kBytesA + kBytesB;
  static constexpr int kBoxBytes = kBoxRows * kBoxN * sizeof(Element);
  static constexpr int kStoreBytes = kBoxBytes;
  static constexpr int kStoreBuffers = 4;
  static constexpr int kSlots = 0, kSlotBytes = 0, kTileBiasBytes = 0;
  static constexpr int kAlignment = 1024;
  static constexpr int kFixedBytes = kAlignment + 256 + kConsumers * 4 * kStoreBuffers * kStoreBytes;
  static constexpr int kStages = (227 * 1024 - kFixedBytes) / kStageBytes;
  static constexpr int kSharedBytes = kFixedBytes + kStages * kStageBytes;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

struct FittedPlace {
  int expert;
  int row;
  int height;
  int column;
};

// Expert by expert: CTAs that run at the same time do not read the weights of two experts. The list is not read through
// the read-only cache, because it is written while a kernel starts that follows the sort.
template <typename Gemm>
__device__ __forceinline__ FittedPlace fitted_place(const FittedGemmArgs& args, int index) {
  const auto tile_at = [&](int at) {
    const int4 bits = *reinterpret_cast<const int4*>(args.fitted.tiles + at);
    return FittedTile{{bits.x}, bits.y, bits.z, bits.w};
  };
  const FittedTile any = tile_at(index / args.tiles_n);  // it has the same expert as the tile in question
  const int2 at = grouped_tile<TileOrder::kGroupM>(index - any.first * args.tiles_n, any.count, args.tiles_n);
  const FittedTile tile = tile_at(any.first + at.x);
  return {tile.code.expert(), tile.row(), tile.height(), min(at.y * Gemm::kTileN, args.last_column)};
}

// Copies rows of tokens to the places where the TMA would have put them. Eight threads copy 128 bytes of a row.
struct GatheredRows {
  static constexpr int kThreads = 128;
  static_assert(kThreads / 8 == kFittedStep, "the rows of a step are copied at once");
  const RowGather& gather;
  uint32_t chunks[kMostFittedRows / kFittedStep];  // start of the thread's rows in x, in steps of 16 bytes

  __device__ __forceinline__ static int chunk() { return threadIdx.x % 8; }
  __device__ __forceinline__ static int row() { return threadIdx.x % kThreads / 8; }

  __device__ __forceinline__ void find(const FittedPlace& tile) {
#pragma unroll
    for (int i = 0; i < kMostFittedRows / kFittedStep; ++i) {
      const int at = i * kFittedStep;
      const int token = at < tile.height ? gather.token_of_row[tile.row + row() + at] : 0;
      chunks[i] = token * static_cast<uint32_t>(gather.x.row_stride / 8);
    }
  }

  __device__ __forceinline__ void copy(uint32_t full, uint32_t a, int k, int height) const {
    const int column = k + chunk() * 8;
    const int bytes = column < gather.k ? 16 : 0;  // k is a multiple of 8
    const char* from = static_cast<const char*>(gather.x.data) + (bytes > 0 ? column * 2 : 0);
    const uint32_t to = a + row() * 128 + (chunk() ^ row() % 8) * 16;
#pragma unroll
    for (int i = 0; i < kMostFittedRows / kFittedStep; ++i) {
      if (i * kFittedStep >= height) break;
      copy_async(to + i * kFittedStep * 128, from + uint64_t{chunks[i]} * 16, bytes);
    }
    arrive_with_copies(full);
  }
};

// Run by one thread, or by GatheredRows::kThreads if rows are gathered. If this kernel starts early, weights for the
// first round of the ring are read before the kernel that writes a is done.
template <typename Gemm>
__device__ __forceinline__ void produce_fitted(const FittedGemmArgs& args, const TiledGemmShared<Gemm>& shared,
                                               int tiles) {
  const bool first = threadIdx.x == Gemm::kConsumers * 128;
  [[maybe_unused]] GatheredRows gathered{args.gather};
  const auto load_weights = [&](const FittedPlace& tile, int stage, int block) {
    const uint32_t full = shared.full(stage);
    const bool of_term = block >= args.own_blocks;
    const int k = (of_term ? block - args.own_blocks : block) * Gemm::kBlockK;
    const int row = tile.expert * (of_term ? args.rank_weight_rows : args.weight_rows) + tile.column;
    mbarrier_arrive_expect(full, Gemm::kBytesB + (Gemm::kGathers ? 0 : tile.height * Gemm::kRowBytes));
    const auto load_part = [&](const CUtensorMap* weight, int part) {
      const uint32_t to = shared.b(stage) + part * (Gemm::kBytesB / 2);
      if (args.reads_once) {
        tma_load(weight, full, to, k, row, first_to_leave_l2());
      } else {
        tma_load(weight, full, to, k, row);
      }
    };
    load_part(of_term ? &args.rank_weight : &args.weight, 0);
    if (Gemm::kGated) load_part(of_term ? &args.rank_up_weight : &args.up_weight, 1);
  };
  int loaded = 0;  // blocks whose weights are in flight
  if (args.starts_early) {
    const int first_round = static_cast<int>(blockIdx.x) < tiles ? min(args.k_blocks, Gemm::kStages) : 0;
    for (; loaded < first_round; ++loaded) load_weights(fitted_place<Gemm>(args, blockIdx.x), loaded, loaded);
    wait_for_previous_kernel();
  }
  RingPosition at(Gemm::kStages);
  for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
    const FittedPlace tile = fitted_place<Gemm>(args, index);
    if constexpr (Gemm::kGathers) gathered.find(tile);
    for (int block = 0; block < args.k_blocks; ++block, at.advance()) {
      const uint32_t full = shared.full(at.stage);
      const bool of_term = block >= args.own_blocks;
      const int k = (of_term ? block - args.own_blocks : block) * Gemm::kBlockK;
      if (args.blocks_together == 1 || block % kMostBlocksTogether == 0) {
        RingPosition last = at;
        for (int i = 1; i < args.blocks_together && block + i < args.k_blocks; ++i) last.advance();
        mbarrier_wait(shared.empty(last.stage), last.parity ^ 1);  // stages are released in order
      }
      if (loaded > 0) {
        --loaded;
      } else if (first) {
        load_weights(tile, at.stage, block);
      }
      if constexpr (Gemm::kGathers) {
        gathered.copy(full, shared.a(at.stage), k, tile.height);
        continue;
      }
      int row = 0;
#pragma unroll
      for (int box = kFittedBoxes - 1; box >= 0; --box) {
        const int rows = kFittedStep << box;
        if ((tile.height & rows) == 0) continue;
        tma_load(of_term ? &args.rank_rows[box] : &args.a[box], full, shared.a(at.stage) + row * Gemm::kRowBytes, k,
                 tile.row + row);
        row += rows;
      }
    }
  }
}

// accumulator = the product of a tile of kHeight rows, whose blocks of k are at `at`.
template <typename Gemm, int kHeight, typename OnLastBlock>
__device__ __forceinline__ void multiply_fitted(const TiledGemmShared<Gemm>& shared, RingPosition& at,
                                                Accumulator<Gemm>& accumulator, int k_blocks,
                                                OnLastBlock&& on_last_block) {
  using Mma = Wgmma<typename Gemm::Element, kHeight, false, false>;
  using Sums = float[kHeight / 2];
  const auto sums = [&](int mma) -> Sums& { return reinterpret_cast<Sums&>(accumulator[mma]); };
  const auto release = [&](int stage) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared.empty(stage));
  };
  const auto fence = [&] {
#pragma unroll
    for (int mma = 0; mma < Gemm::kMmas; ++mma) fence_accumulator(sums(mma));
  };
  // Prevents ptxas from treating what the epilogue left there as a write within the pipeline, as in the tiled loop.
#pragma unroll
  for (int mma = 0; mma < Gemm::kMmas; ++mma) {
#pragma unroll
    for (int i = 0; i < kHeight / 2; ++i) accumulator[mma][i] = 0.0f;
  }
  int previous = 0;
  for (int block = 0; block < k_blocks; ++block) {
    mbarrier_wait(shared.full(at.stage), at.parity);
    if (block == k_blocks - 1) on_last_block();
    if constexpr (Gemm::kFences) fence_shared_to_async();  // other threads' writes, before wgmma reads them
    fence();
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Gemm::kBlockK / kWgmmaK; ++step) {
#pragma unroll
      for (int mma = 0; mma < Gemm::kMmas; ++mma) {
        Mma::multiply(sums(mma),
                      wgmma_descriptor(shared.b(at.stage) + mma * Gemm::kBytesB / 2 + step * kWgmmaStepBytes),
                      wgmma_descriptor(shared.a(at.stage) + step * kWgmmaStepBytes), block > 0 || step > 0);
      }
    }
    wgmma_commit();
    fence();
    wgmma_wait<1>();
    if (block > 0) release(previous);
    previous = at.stage;
    at.advance();
  }
  wgmma_wait<0>();
  fence();
  release(previous);
}

// Calls multiply(height as a constant).
template <int kHeight, typename Multiply>
__device__ __forceinline__ void visit_height(int height, Multiply&& multiply) {
  if constexpr (kHeight < kMostFittedRows) {
    if (height > kHeight) return visit_height<kHeight + kFittedStep>(height, multiply);
  }
  multiply.template operator()<kHeight>();
}

// The biases of a thread's two columns, eight apart, of an operand; 0 if there are none.
template <typename Element>
__device__ __forceinline__ float2 fitted_biases(const FittedGemmArgs& args, const void* biases, int expert,
                                                int column) {
  if (biases == nullptr) return make_float2(0.0f, 0.0f);
  const auto at = [&](int column) {  // past the end nothing is stored
    const int64_t index = expert * args.bias_stride + min(column, args.n - 1) * args.bias_step;
    return args.float_bias ? __ldg(static_cast<const float*>(biases) + index)
                           : static_cast<float>(__ldg(static_cast<const Element*>(biases) + index));
  };
  return make_float2(at(column), at(column + 8));
}

// Stores the warp's 16 columns of each output. Leaves the accumulators undefined.
template <typename Gemm, Activation A>
__device__ __forceinline__ void store_fitted(const FittedGemmArgs& args, Accumulator<Gemm>& accumulator,
                                             uint32_t stores, int& buffer, const FittedPlace& tile) {
  using Element = typename Gemm::Element;
  constexpr int kCount = kFittedStep / 2;  // results of a thread in a step
  constexpr int kShift = Gemm::kChunk / 2;
  const uint32_t thread_offset = store_offset<Gemm>();
  const int warp_column = tile.column + warp_uniform(threadIdx.x / 32) % 4 * 16;
  const int thread_column = warp_column + threadIdx.x % 32 / 4;
  float2 biases[2];
  biases[0] = fitted_biases<Element>(args, args.epilogue.bias, tile.expert, thread_column);
  biases[1] = Gemm::kGated ? fitted_biases<Element>(args, args.epilogue.up_bias, tile.expert, thread_column)
                           : fitted_biases<Element>(args, args.epilogue.bias, tile.expert, thread_column + 64);
  // A box is sent when the next one is made, so that the fence does not have to wait until it is written.
  uint32_t store = 0;
  const CUtensorMap* to = nullptr;
  int row = 0, column = 0;
  const auto send = [&] { send_boxes<Gemm>(*to, store, row, column); };
  const auto write = [&](const CUtensorMap& map, const float (&value)[kCount], int at_row, int at_column) {
    if (store != 0) send();
    store = next_buffer<Gemm>(stores, buffer);
    to = &map, row = at_row, column = at_column;
    // The four matrices: columns 0 to 7 of rows 0 to 7, then of rows 8 to 15; then columns 8 to 15 likewise.
    store_matrix_x4_transposed(store + thread_offset, round_pair<Element>(value[0], value[1]),
                               round_pair<Element>(value[4], value[5]), round_pair<Element>(value[2], value[3]),
                               round_pair<Element>(value[6], value[7]));
  };
#pragma unroll 1
  for (int chunk = 0; chunk < tile.height; chunk += Gemm::kChunk) {
#pragma unroll
    for (int step = 0; step < Gemm::kChunk / kFittedStep; ++step) {
      if (chunk + step * kFittedStep >= tile.height) break;
      const int step_row = tile.row + chunk + step * kFittedStep;
#pragma unroll
      for (int output = 0; output < Gemm::kOutputs; ++output) {
        float value[kCount];
        const auto sums = [&](Operand operand, auto&& take) {
          const int mma = operand == Operand::kUp ? 1 : output;
#pragma unroll
          for (int i = 0; i < kCount; ++i) {
            const float bias = i / 2 % 2 == 0 ? biases[mma].x : biases[mma].y;
            const float sum = fmaf(accumulator[mma][step * kCount + i], Gemm::kUnscale, bias);
            take(i, Gemm::kGated ? limited(args.limits, operand, sum) : sum);
          }
        };
        const auto keep = [&](Operand operand, const CUtensorMap& map) {
          sums(operand, [&](int i, float sum) { value[i] = sum; });
          write(map, value, step_row, warp_column);
        };
        if constexpr (Gemm::kKept) keep(Operand::kGate, args.gate), keep(Operand::kUp, args.up);
        GluEpilogue<Gemm::kProduct>::apply(value, FixedActivation<A, Element>(), sums);
        write(args.out, value, step_row, warp_column + output * 64);
      }
    }
    // Moves the next chunk's accumulators to the indices that the loop's body uses.
#pragma unroll
    for (int mma = 0; mma < Gemm::kMmas; ++mma) {
#pragma unroll
      for (int i = 0; i < Gemm::kAccumulators - kShift; ++i) accumulator[mma][i] = accumulator[mma][i + kShift];
    }
  }
  send();
}

template <typename Gemm>
__device__ __forceinline__ void consume_fitted(const FittedGemmArgs& args, const TiledGemmShared<Gemm>& shared,
                                               int tiles) {
  const int warp = warp_uniform(threadIdx.x / 32);
  const int consumer = warp / 4;
  int buffer = 0;  // for the next store
  RingPosition at(Gemm::kStages);
  int index = blockIdx.x;
  if (consumer == 1) {
    at.skip(args.k_blocks);
    index += gridDim.x;
  }
  // A warpgroup waits until the other one's whole tile has arrived, as in the tiled loop.
  constexpr int kTurnBarrier = 1;
  const bool idle = static_cast<int>(blockIdx.x) >= tiles;
  if (consumer == 1 && !idle) named_barrier_arrive(kTurnBarrier, Gemm::kConsumers * 128);
  Accumulator<Gemm> accumulator;
  for (; index < tiles; index += 2 * gridDim.x) {
    const FittedPlace tile = fitted_place<Gemm>(args, index);
    named_barrier_sync(kTurnBarrier + consumer, Gemm::kConsumers * 128);
    const auto on_last_block = [&] {
      if (index + static_cast<int>(gridDim.x) < tiles)
        named_barrier_arrive(kTurnBarrier + 1 - consumer, Gemm::kConsumers * 128);
    };
    visit_height<kFittedStep>(tile.height, [&]<int kHeight>() {
      multiply_fitted<Gemm, kHeight>(shared, at, accumulator, args.k_blocks, on_last_block);
    });
    at.skip(args.k_blocks);
    visit_activation(args.epilogue.activation, [&]<Activation A>() {
      store_fitted<Gemm, A>(args, accumulator, shared.store(warp), buffer, tile);
    });
  }
  if (threadIdx.x % 32 == 0) tma_store_wait_read<0>();
  __syncwarp();
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <typename Gemm>
__global__ void __launch_bounds__(Gemm::kThreads, 1) fitted_gemm_kernel(const __grid_constant__ FittedGemmArgs args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ uint8_t raw_shared[];
  const TiledGemmShared<Gemm> shared(raw_shared);

  if (threadIdx.x == 0) {
    for (int box = 0; box < (Gemm::kGathers ? 0 : kFittedBoxes); ++box) prefetch_tensor_map(&args.a[box]);
    prefetch_tensor_map(&args.weight);
    if (Gemm::kGated) prefetch_tensor_map(&args.up_weight);
    prefetch_tensor_map(&args.out);
    for (int stage = 0; stage < Gemm::kStages; ++stage) {
      mbarrier_init(shared.full(stage), 1 + (Gemm::kGathers ? GatheredRows::kThreads : 0));
      mbarrier_init(shared.empty(stage), 4);  // one arrival per warp
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  if (args.follows_sort) wait_for_previous_kernel();
  allow_next_kernel();  // it may read the tiles, which are written

  const int tiles = *args.fitted.count * args.tiles_n;
  if (threadIdx.x >= Gemm::kConsumers * 128) {
    shrink_registers<40>();
    if (Gemm::kGathers || threadIdx.x == Gemm::kConsumers * 128) produce_fitted<Gemm>(args, shared, tiles);
    __syncwarp();
  } else {
    grow_registers<232>();
    consume_fitted<Gemm>(args, shared, tiles);
  }
#endif
}

}  // namespace fused_mlp::sm90
