// The epilogue of the product dy W, the gradient of the hidden values: it becomes the gradients of gate and up in
// registers, and is never stored. What the forward kept comes through slots of shared memory, which a thread beside the
// producer of each warpgroup fills steps ahead and across tiles: 64 rows of gate and up, kStepN columns at a time. Each
// warp puts the results of its 16 rows, and the hidden values, into buffers of its own, and the TMA stores them.
#pragma once

#include "../gemm/epilogue.cuh"
#include "ptx.cuh"
#include "ring.cuh"
#include "tiled_layout.cuh"
#include "tiled_store.cuh"

namespace fused_mlp::sm90 {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <typename Gemm>
struct GradientSteps {
  static constexpr int kOfRow = Gemm::kShareN / Gemm::kStepN;  // steps of 64 rows
  static constexpr int kOfTile = Gemm::kMmas * kOfRow;
  __device__ __forceinline__ static int row(int step) { return step / kOfRow * 64; }
  __device__ __forceinline__ static int column(int step) { return step % kOfRow * Gemm::kStepN; }
};

// Keeps the slots of a consumer filled.
template <typename Gemm>
__device__ __forceinline__ void load_kept(const typename Gemm::Args& args, const TiledGemmShared<Gemm>& shared,
                                          int consumer) {
  using Steps = GradientSteps<Gemm>;
  const auto tiles = tile_order(args);
  RingPosition at(Gemm::kSlots);
  for (int index = blockIdx.x + consumer * gridDim.x; index < tiles.count(); index += Gemm::kConsumers * gridDim.x) {
    const Tile tile = tiles.template tile<Gemm>(index);
#pragma unroll 1
    for (int step = 0; step < Steps::kOfTile; ++step, at.advance()) {
      const uint32_t full = shared.slot_full(consumer, at.stage), gate = shared.slot(consumer, at.stage);
      const int row = tile.row + Steps::row(step), column = tile.column + Steps::column(step);
      mbarrier_wait(shared.slot_empty(consumer, at.stage), at.parity ^ 1);
      mbarrier_arrive_expect(full, Gemm::kSlotBytes);
      tma_load(&args.gate, full, gate, column, row);
      if (Gemm::kOfUp) tma_load(&args.up, full, gate + Gemm::kSlotBytes / 2, column, row);
    }
  }
}

// Two elements of a register that ldmatrix has filled.
template <typename Element>
__device__ __forceinline__ float2 unpack(uint32_t bits) {
  return to_float2(*reinterpret_cast<const typename ElementTraits<Element>::Pair*>(&bits));
}

// The gradients of 16 columns of a step, and the hidden values.
struct GradientColumns {
  uint32_t gate[4], value[4], up[4];
};

// They are made of those in `gradient`, and of what lies at `gate` and `up`.
template <typename Gemm, Activation A>
__device__ __forceinline__ GradientColumns differentiate(const float* gradient, uint32_t gate, uint32_t up) {
  using Element = typename Gemm::Element;
  GradientColumns columns;
  load_matrix_x4(gate, columns.gate);
  if constexpr (Gemm::kOfUp) load_matrix_x4(up, columns.up);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 at_gate = unpack<Element>(columns.gate[i]);
    const float2 at_up = Gemm::kOfUp ? unpack<Element>(columns.up[i]) : make_float2(1.0f, 1.0f);
    const GluGradient<A> low(gradient[2 * i], at_gate.x, at_up.x), high(gradient[2 * i + 1], at_gate.y, at_up.y);
    columns.gate[i] = round_pair<Element>(low.gate, high.gate);
    columns.up[i] = round_pair<Element>(low.up, high.up);
    columns.value[i] = round_pair<Element>(low.value, high.value);
  }
  return columns;
}

// Stores what the gradients in the accumulators make, for the warp's rows of the tile, 16 of every 64. Leaves the
// accumulators undefined. The code covers one step: it must fit the innermost instruction cache.
template <typename Gemm, Activation A>
__device__ __forceinline__ void store_gradients(const typename Gemm::Args& args, const TiledGemmShared<Gemm>& shared,
                                                Accumulator<Gemm>& accumulator, RingPosition& at, int warp, int& buffer,
                                                int first_row, int first_column) {
  using Steps = GradientSteps<Gemm>;
  constexpr int kCount = Gemm::kStepN / 2;  // accumulators of a step
  const int consumer = warp / 4;
  const uint32_t offset = store_offset<Gemm>();
  const auto store_columns = [](uint32_t address, const uint32_t (&columns)[4]) {
    store_matrix_x4(address, columns[0], columns[1], columns[2], columns[3]);
  };
#pragma unroll 1
  for (int step = 0; step < Steps::kOfTile; ++step, at.advance()) {
    const int row = first_row + Steps::row(step), column = first_column + Steps::column(step);
    const uint32_t gate = shared.slot(consumer, at.stage) + warp % 4 * Gemm::kBoxBytes + offset;
    uint32_t store = 0;  // of gate's gradient; behind it come the value, and up's gradient
    mbarrier_wait(shared.slot_full(consumer, at.stage), at.parity);
#pragma unroll
    for (int i = 0; i < kCount; i += 8) {
      const GradientColumns columns =
          differentiate<Gemm, A>(&accumulator[0][i], gate ^ i * 4, (gate + Gemm::kSlotBytes / 2) ^ i * 4);
      if (i == 0) store = next_buffer<Gemm>(shared.store(warp), buffer);
      const uint32_t to = (store + offset) ^ i * 4;
      store_columns(to, columns.gate);
      store_columns(to + Gemm::kBoxBytes, columns.value);
      if constexpr (Gemm::kOfUp) store_columns(to + 2 * Gemm::kBoxBytes, columns.up);
    }
    fence_shared_to_async();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      mbarrier_arrive(shared.slot_empty(consumer, at.stage));
      tma_store(&args.gate_gradient, store, column, row);
      if (args.stores_value) tma_store(&args.out, store + Gemm::kBoxBytes, column, row);
      if (Gemm::kOfUp) tma_store(&args.up_gradient, store + 2 * Gemm::kBoxBytes, column, row);
      tma_store_commit();
    }
    // The next step's accumulators, where the loop's body wants them.
#pragma unroll
    for (int i = 0; i < (Steps::kOfTile - 1) * kCount; ++i) {
      const int next = i + kCount;
      accumulator[i / Gemm::kAccumulators][i % Gemm::kAccumulators] =
          accumulator[next / Gemm::kAccumulators][next % Gemm::kAccumulators];
    }
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace fused_mlp::sm90
