// Stores the tiles of a GEMM with swapped operands. A thread's accumulators belong to two columns of the output, eight
// apart, and to 2 of every 8 rows. They are transposed on the way into shared memory, and the TMA stores them in boxes
// of a warp's 16 columns.
#pragma once

#include "../../gemm/epilogue.cuh"
#include "../ptx.cuh"
#include "tiled_layout.cuh"
#include "tiled_store.cuh"

namespace fused_mlp::sm90 {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// The bias of this thread's two columns; 0 if there is none.
template <typename Element>
__device__ __forceinline__ float2 load_bias_of_rows(const void* bias, int first_column, int n) {
  if (bias == nullptr) return make_float2(0.0f, 0.0f);
  const int column = first_column + threadIdx.x % 32 / 4;
  const auto at = [&](int c) { return static_cast<float>(__ldg(static_cast<const Element*>(bias) + min(c, n - 1))); };
  return make_float2(at(column), at(column + 8));  // past the end nothing is stored
}

// Stores the warp's 16 columns (16 of each half of the tile if it is not gated). Leaves the accumulators undefined.
template <typename Gemm, Activation A>
__device__ __forceinline__ void store_swapped_tile(const TiledGemmArgs& args, Accumulator<Gemm>& accumulator,
                                                   uint32_t stores, int& buffer, int first_row, int first_column) {
  using Element = typename Gemm::Element;
  constexpr int kStepM = Gemm::kBoxRows;
  constexpr int kCount = kStepM / 2;  // results of a thread in a step
  constexpr int kShift = Gemm::kChunkM / 2;
  constexpr int kChunks = Gemm::kStoredM / Gemm::kChunkM;  // per wgmma of a plain product, per pair of a gated one
  constexpr int kLastChunk = Gemm::kMmas / Gemm::kParts * kChunks - 1;
  constexpr int kSteps = (Gemm::kChunkM + kStepM - 1) / kStepM;
  // If the last step would cross the end of the chunk, it starts earlier and repeats some rows.
  const auto row_of = [](int step) { return at_most(Gemm::kChunkM - kStepM, step * kStepM); };
  const uint32_t thread_offset = store_offset<Gemm>();
#pragma unroll 1
  for (int chunk = 0; chunk <= kLastChunk; ++chunk) {
    const int row = first_row + chunk % kChunks * Gemm::kChunkM;
    const int column = first_column + chunk / kChunks * Gemm::kMmaStride;
    const float2 bias = load_bias_of_rows<Element>(args.epilogue.bias, column, args.n);
    const float2 up_bias = load_bias_of_rows<Element>(Gemm::kGated ? args.epilogue.up_bias : nullptr, column, args.n);
    uint32_t store = 0;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      float value[kCount];
      const auto sums = [&](Operand operand, auto&& take) {
        const int part = operand == Operand::kGate ? 0 : 1;
        const float2 added = operand == Operand::kGate ? bias : up_bias;
#pragma unroll
        for (int i = 0; i < kCount; ++i)
          take(i, accumulator[part][row_of(step) / 2 + i] + (i / 2 % 2 == 0 ? added.x : added.y));
      };
      GluEpilogue<Gemm::kProduct>::apply(value, FixedActivation<A, Element>(), sums);
      // The boxes of the last step are sent only now, so that the fence does not have to wait until they are written.
      if (step > 0) send_boxes<Gemm>(args.out, store, row + row_of(step - 1), column);
      store = next_buffer<Gemm>(stores, buffer);
      // The four matrices: columns 0 to 7 of rows 0 to 7, then of rows 8 to 15; then columns 8 to 15 likewise.
      store_matrix_x4_transposed(store + thread_offset, round_pair<Element>(value[0], value[1]),
                                 round_pair<Element>(value[4], value[5]), round_pair<Element>(value[2], value[3]),
                                 round_pair<Element>(value[6], value[7]));
    }
    send_boxes<Gemm>(args.out, store, row + Gemm::kChunkM - kStepM, column);
    // Shifts the next chunk's accumulators to the indices that the loop's body uses.
    if constexpr (Gemm::kGated) {
#pragma unroll
      for (int part = 0; part < Gemm::kParts; ++part) {
#pragma unroll
        for (int i = 0; i < kLastChunk * kShift; ++i) accumulator[part][i] = accumulator[part][i + kShift];
      }
    } else {
#pragma unroll
      for (int i = 0; i < kLastChunk * kShift; ++i) {
        const int next = i + kShift;
        accumulator[i / Gemm::kAccumulators][i % Gemm::kAccumulators] =
            accumulator[next / Gemm::kAccumulators][next % Gemm::kAccumulators];
      }
    }
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace fused_mlp::sm90
