// The epilogue of the product dy W, the gradient of the hidden values: it becomes the gradients of gate and up in
// registers, and is never stored. What the forward kept passes through slots of shared memory, of which every warp has
// its own: the TMA brings 16 rows of gate and up, kStepN columns at a time, steps ahead and across tiles; the warp puts
// their gradients in their place, and the hidden values beside them; and the TMA stores all three.
#pragma once

#include "../gemm/epilogue.cuh"
#include "ptx.cuh"
#include "ring.cuh"
#include "tiled_layout.cuh"
#include "tiled_store.cuh"

namespace fused_mlp::sm90 {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// The slots of a warp: the next to be loaded, of which all lanes know, and the next to be read.
template <typename Gemm>
struct GradientSlots {
  static constexpr int kSlots = Gemm::kStoreBuffers;
  static constexpr int kStepsOfTile = Gemm::kMmas * Gemm::kShareN / Gemm::kStepN;
  const TiledGemmShared<Gemm>& shared;
  int warp;
  int tile_index;  // of the next step to load
  int step = 0;    // likewise
  int load_slot = 0;
  RingPosition at{kSlots};

  __device__ __forceinline__ GradientSlots(const TiledGemmShared<Gemm>& shared, int warp, int first_tile)
      : shared(shared), warp(warp), tile_index(first_tile) {}

  // In a slot: gate, the value, and up.
  __device__ __forceinline__ uint32_t gate(int slot) const { return shared.store(warp) + slot * Gemm::kStoreBytes; }
  __device__ __forceinline__ uint32_t value(int slot) const { return gate(slot) + Gemm::kBoxBytes; }
  __device__ __forceinline__ uint32_t up(int slot) const { return value(slot) + Gemm::kBoxBytes; }

  // Starts the load of the next step, if there is one, into the next slot. The TMA must be done with what was there.
  template <typename Args, typename Tiles>
  __device__ __forceinline__ void load_next(const Args& args, const Tiles& tiles) {
    if (tile_index >= tiles.count()) return;
    if (threadIdx.x % 32 == 0) {
      const Tile tile = tiles.template tile<Gemm>(tile_index);
      constexpr int kStepsOfRow = kStepsOfTile / Gemm::kMmas;
      const int row = tile.row + warp % 4 * 16 + step / kStepsOfRow * 64;
      const int column = tile.column + step % kStepsOfRow * Gemm::kStepN;
      const uint32_t full = shared.slot_full(warp, load_slot);
      mbarrier_arrive_expect(full, (Gemm::kOfUp ? 2 : 1) * Gemm::kBoxBytes);
      tma_load(&args.gate, full, gate(load_slot), column, row);
      if (Gemm::kOfUp) tma_load(&args.up, full, up(load_slot), column, row);
    }
    load_slot = load_slot + 1 == kSlots ? 0 : load_slot + 1;
    if (++step == kStepsOfTile) {
      step = 0;
      tile_index += Gemm::kConsumers * gridDim.x;
    }
  }

  // All slots but one: that one is loaded when the first step has been stored.
  template <typename Args, typename Tiles>
  __device__ __forceinline__ void load_first(const Args& args, const Tiles& tiles) {
    for (int slot = 0; slot < kSlots - 1; ++slot) load_next(args, tiles);
  }
};

// Two elements of a register that ldmatrix has filled.
template <typename Element>
__device__ __forceinline__ float2 unpack(uint32_t bits) {
  return to_float2(*reinterpret_cast<const typename ElementTraits<Element>::Pair*>(&bits));
}

// 16 columns of a step: the gradients of the values that lie at `gate` and `up`, from those in `gradient`.
template <typename Gemm, Activation A>
__device__ __forceinline__ void differentiate(const float* gradient, uint32_t gate, uint32_t value, uint32_t up) {
  using Element = typename Gemm::Element;
  uint32_t gates[4], ups[4], values[4];
  load_matrix_x4(gate, gates);
  if constexpr (Gemm::kOfUp) load_matrix_x4(up, ups);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 at_gate = unpack<Element>(gates[i]);
    const float2 at_up = Gemm::kOfUp ? unpack<Element>(ups[i]) : make_float2(1.0f, 1.0f);
    const GluGradient<A> low(gradient[2 * i], at_gate.x, at_up.x), high(gradient[2 * i + 1], at_gate.y, at_up.y);
    gates[i] = round_pair<Element>(low.gate, high.gate);
    ups[i] = round_pair<Element>(low.up, high.up);
    values[i] = round_pair<Element>(low.value, high.value);
  }
  __syncwarp();  // all lanes have read what is overwritten now
  store_matrix_x4(gate, gates[0], gates[1], gates[2], gates[3]);
  store_matrix_x4(value, values[0], values[1], values[2], values[3]);
  if constexpr (Gemm::kOfUp) store_matrix_x4(up, ups[0], ups[1], ups[2], ups[3]);
}

// Stores what the gradients in the accumulators make, for the warp's rows of the tile, 16 of every 64. Leaves the
// accumulators undefined. The code covers one step: it must fit the innermost instruction cache.
template <typename Gemm, Activation A, typename Tiles>
__device__ __forceinline__ void store_gradients(const typename Gemm::Args& args, const Tiles& tiles,
                                                Accumulator<Gemm>& accumulator, GradientSlots<Gemm>& slots,
                                                int first_row, int first_column) {
  constexpr int kCount = Gemm::kStepN / 2;  // accumulators of a step
  constexpr int kSteps = GradientSlots<Gemm>::kStepsOfTile;
  constexpr int kStepsOfRow = kSteps / Gemm::kMmas;
  const uint32_t offset = store_offset<Gemm>();
#pragma unroll 1
  for (int step = 0; step < kSteps; ++step, slots.at.advance()) {
    const int row = first_row + step / kStepsOfRow * 64;
    const int column = first_column + step % kStepsOfRow * Gemm::kStepN;
    const int slot = slots.at.stage;
    mbarrier_wait(slots.shared.slot_full(slots.warp, slot), slots.at.parity);
#pragma unroll
    for (int i = 0; i < kCount; i += 8) {
      differentiate<Gemm, A>(&accumulator[0][i], (slots.gate(slot) + offset) ^ i * 4,
                             (slots.value(slot) + offset) ^ i * 4, (slots.up(slot) + offset) ^ i * 4);
    }
    fence_shared_to_async();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      tma_store(&args.gate_gradient, slots.gate(slot), column, row);
      if (Gemm::kOfUp) tma_store(&args.up_gradient, slots.up(slot), column, row);
      if (args.stores_value) tma_store(&args.out, slots.value(slot), column, row);
      tma_store_commit();
      tma_store_wait_read<1>();  // the step before this one has been read: its slot is the next to be loaded
    }
    slots.load_next(args, tiles);
#pragma unroll
    for (int i = 0; i < (kSteps - 1) * kCount; ++i) {  // the next step's accumulators, where the loop's body wants them
      const int next = i + kCount;
      accumulator[i / Gemm::kAccumulators][i % Gemm::kAccumulators] =
          accumulator[next / Gemm::kAccumulators][next % Gemm::kAccumulators];
    }
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace fused_mlp::sm90
