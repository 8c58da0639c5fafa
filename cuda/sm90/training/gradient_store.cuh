// The epilogue of the product dy W, the gradient of the hidden values: it becomes the gradients of gate and up in
// registers, and is never stored. What the forward kept arrives in slots of shared memory. One thread per warpgroup, in
// addition to the producer, fills them steps ahead and across tiles: 64 rows of gate and up, kStepN columns at a time.
// Each warp writes the gradients of its 16 rows over their operands, and the hidden values into a buffer of its own,
// and the TMA stores both. Then the slot is free for the next load.
//
// If rows are grouped by weights, each is multiplied by a number, which the products around this one leave out.
#pragma once

#include "../../gemm/epilogue.cuh"
#include "../dense/tiled_layout.cuh"
#include "../dense/tiled_store.cuh"
#include "../ptx.cuh"
#include "../ring.cuh"

namespace fused_mlp::sm90 {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <typename Gemm>
struct GradientSteps {
  static constexpr int kOfRow = Gemm::kTileN / Gemm::kStepN;  // steps per 64 rows
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
    const auto tile = tiles.template tile<Gemm>(index);
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

// Extension point for a thread's two of a warp's 16 rows, called around the differentiation: by default it does
// nothing.
template <typename Gemm, bool kGrouped = Gemm::kGrouped>
struct GradientRows {
  template <typename Tile>
  __device__ __forceinline__ GradientRows(const typename Gemm::Args&, const Tile&) {}
  __device__ __forceinline__ void begin(int) {}
  __device__ __forceinline__ float scaled(int, float value) const { return value; }
  __device__ __forceinline__ void add(int, float, float) {}
  __device__ __forceinline__ uint32_t kept(int, uint32_t bits) const { return bits; }
  __device__ __forceinline__ void end(int, int) {}
};

__device__ __forceinline__ void store_columns(uint32_t address, const uint32_t (&columns)[4]) {
  store_matrix_x4(address, columns[0], columns[1], columns[2], columns[3]);
}

// Replaces 16 columns of gate and up by their gradients, computed from those in `gradient`, and leaves the hidden
// values in `values`.
template <typename Gemm, Activation A>
__device__ __forceinline__ void differentiate(const float* gradient, uint32_t gate, uint32_t up, uint32_t (&values)[4],
                                              GradientRows<Gemm>& rows) {
  using Element = typename Gemm::Element;
  uint32_t gates[4], ups[4];
  load_matrix_x4(gate, gates);
  if constexpr (Gemm::kOfUp) load_matrix_x4(up, ups);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 at_gate = unpack<Element>(gates[i]);
    const float2 at_up = Gemm::kOfUp ? unpack<Element>(ups[i]) : make_float2(1.0f, 1.0f);
    const GluGradient<A> low(rows.scaled(i % 2, gradient[2 * i]), at_gate.x, at_up.x);
    const GluGradient<A> high(rows.scaled(i % 2, gradient[2 * i + 1]), at_gate.y, at_up.y);
    rows.add(i % 2, gradient[2 * i], low.value);
    rows.add(i % 2, gradient[2 * i + 1], high.value);
    gates[i] = rows.kept(i % 2, round_pair<Element>(low.gate, high.gate));
    ups[i] = rows.kept(i % 2, round_pair<Element>(low.up, high.up));
    values[i] = rows.kept(i % 2, round_pair<Element>(rows.scaled(i % 2, low.value), rows.scaled(i % 2, high.value)));
  }
  store_columns(gate, gates);
  if constexpr (Gemm::kOfUp) store_columns(up, ups);
}

// Stores the results of the gradients in the accumulators, for the warp's rows of the tile, 16 of every 64. Leaves the
// accumulators undefined. The code covers one step: it must fit into the innermost instruction cache.
template <typename Gemm, Activation A, typename Tile>
__device__ __forceinline__ void store_gradients(const typename Gemm::Args& args, const TiledGemmShared<Gemm>& shared,
                                                Accumulator<Gemm>& accumulator, RingPosition& at, int warp, int& buffer,
                                                const Tile& tile, int warp_row) {
  using Steps = GradientSteps<Gemm>;
  constexpr int kCount = Gemm::kStepN / 2;  // accumulators of a step
  GradientRows<Gemm> rows(args, tile);
  const int consumer = warp / 4;
  const uint32_t offset = store_offset<Gemm>();
  uint32_t stored = 0;  // the barrier of the previous slot, which the TMA reads
  const auto release = [&] {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(stored);
  };
#pragma unroll 1
  for (int step = 0; step < Steps::kOfTile; ++step, at.advance()) {
    const int row = tile.row + warp_row + Steps::row(step), column = tile.column + Steps::column(step);
    rows.begin(row);
    const uint32_t gate = shared.slot(consumer, at.stage) + warp % 4 * Gemm::kBoxBytes;
    const uint32_t up = gate + Gemm::kSlotBytes / 2;
    uint32_t values[kCount / 8][4];
    mbarrier_wait(shared.slot_full(consumer, at.stage), at.parity);
#pragma unroll
    for (int i = 0; i < kCount / 8; ++i) {
      const uint32_t gate_columns = (gate + offset) ^ i * 32, up_columns = (up + offset) ^ i * 32;
      differentiate<Gemm, A>(&accumulator[0][i * 8], gate_columns, up_columns, values[i], rows);
    }
    const uint32_t value = next_buffer<Gemm>(shared.store(warp), buffer);
    if (step > 0) release();
#pragma unroll
    for (int i = 0; i < kCount / 8; ++i) store_columns((value + offset) ^ i * 32, values[i]);
    fence_shared_to_async();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      tma_store(&args.gate_gradient, gate, column, row);
      if (args.stores_value) tma_store(&args.out, value, column, row);
      if (Gemm::kOfUp) tma_store(&args.up_gradient, up, column, row);
      tma_store_commit();
    }
    stored = shared.slot_empty(consumer, at.stage);
    rows.end(row, column);
    // Moves the next step's accumulators to the indices that the loop's body uses.
#pragma unroll
    for (int i = 0; i < (Steps::kOfTile - 1) * kCount; ++i) {
      const int next = i + kCount;
      accumulator[i / Gemm::kAccumulators][i % Gemm::kAccumulators] =
          accumulator[next / Gemm::kAccumulators][next % Gemm::kAccumulators];
    }
  }
  if (threadIdx.x % 32 == 0) tma_store_wait_read<0>();
  release();
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace fused_mlp::sm90
