// The epilogue of the product dy W, the gradient of the hidden values: it becomes the gradients of gate and up in
// registers, and is never stored. What the forward kept comes through slots of shared memory, which a thread beside the
// producer of each warpgroup fills steps ahead and across tiles: 64 rows of gate and up, kStepN columns at a time. Each
// warp puts the results of its 16 rows, and the hidden values, into buffers of its own, and the TMA stores them.
//
// Rows that are grouped by weights are each multiplied by a number, which the products around this one leave out.
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
  // Those of a tile: the rows of its other half may not be there.
  template <typename Tile>
  __device__ __forceinline__ static int of(const Tile& tile) {
    return tile.half_empty() ? kOfTile / 2 : kOfTile;
  }
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
    const auto tile = tiles.template tile<Gemm>(index);
    const int steps = Steps::of(tile);
#pragma unroll 1
    for (int step = 0; step < steps; ++step, at.advance()) {
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

// What is done to a thread's two rows of a warp's 16, beside differentiating: nothing.
template <typename Gemm, bool kGrouped = Gemm::kGrouped>
struct GradientRows {
  template <typename Tile>
  __device__ __forceinline__ GradientRows(const typename Gemm::Args&, const Tile&) {}
  __device__ __forceinline__ void begin(int) {}
  template <typename Gradient>
  __device__ __forceinline__ void take(int, float, Gradient&) {}
  __device__ __forceinline__ uint32_t kept(int, uint32_t bits) const { return bits; }
  __device__ __forceinline__ void end(int) {}
};

// The gradients of 16 columns of a step, and the hidden values.
struct GradientColumns {
  uint32_t gate[4], value[4], up[4];
};

// They are made of those in `gradient`, and of what lies at `gate` and `up`.
template <typename Gemm, Activation A>
__device__ __forceinline__ GradientColumns differentiate(const float* gradient, uint32_t gate, uint32_t up,
                                                         GradientRows<Gemm>& rows) {
  using Element = typename Gemm::Element;
  GradientColumns columns;
  load_matrix_x4(gate, columns.gate);
  if constexpr (Gemm::kOfUp) load_matrix_x4(up, columns.up);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 at_gate = unpack<Element>(columns.gate[i]);
    const float2 at_up = Gemm::kOfUp ? unpack<Element>(columns.up[i]) : make_float2(1.0f, 1.0f);
    GluGradient<A> low(gradient[2 * i], at_gate.x, at_up.x), high(gradient[2 * i + 1], at_gate.y, at_up.y);
    rows.take(i % 2, gradient[2 * i], low);
    rows.take(i % 2, gradient[2 * i + 1], high);
    columns.gate[i] = rows.kept(i % 2, round_pair<Element>(low.gate, high.gate));
    columns.up[i] = rows.kept(i % 2, round_pair<Element>(low.up, high.up));
    columns.value[i] = rows.kept(i % 2, round_pair<Element>(low.value, high.value));
  }
  return columns;
}

// Stores what the gradients in the accumulators make, for the warp's rows of the tile, 16 of every 64. Leaves the
// accumulators undefined. The code covers one step: it must fit the innermost instruction cache.
template <typename Gemm, Activation A, typename Tile>
__device__ __forceinline__ void store_gradients(const typename Gemm::Args& args, const TiledGemmShared<Gemm>& shared,
                                                Accumulator<Gemm>& accumulator, RingPosition& at, int warp, int& buffer,
                                                const Tile& tile, int warp_row) {
  using Steps = GradientSteps<Gemm>;
  constexpr int kCount = Gemm::kStepN / 2;  // accumulators of a step
  const int steps = Steps::of(tile);
  GradientRows<Gemm> rows(args, tile);
  const int consumer = warp / 4;
  const uint32_t offset = store_offset<Gemm>();
  const auto store_columns = [](uint32_t address, const uint32_t (&columns)[4]) {
    store_matrix_x4(address, columns[0], columns[1], columns[2], columns[3]);
  };
#pragma unroll 1
  for (int step = 0; step < steps; ++step, at.advance()) {
    const int row = tile.row + warp_row + Steps::row(step), column = tile.column + Steps::column(step);
    if (step % Steps::kOfRow == 0) rows.begin(row);
    const uint32_t gate = shared.slot(consumer, at.stage) + warp % 4 * Gemm::kBoxBytes + offset;
    uint32_t store = 0;  // of gate's gradient; behind it come the value, and up's gradient
    mbarrier_wait(shared.slot_full(consumer, at.stage), at.parity);
#pragma unroll
    for (int i = 0; i < kCount; i += 8) {
      const GradientColumns columns =
          differentiate<Gemm, A>(&accumulator[0][i], gate ^ i * 4, (gate + Gemm::kSlotBytes / 2) ^ i * 4, rows);
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
    if (step % Steps::kOfRow == Steps::kOfRow - 1) rows.end(row);
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
