// Stores the tiles of a GEMM whose rows of a are the wgmma's M side: the epilogue works in registers, and the TMA
// stores the results from shared memory.
#pragma once

#include "../../gemm/epilogue.cuh"
#include "../ptx.cuh"
#include "tiled_layout.cuh"

namespace fused_mlp::sm90 {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// The place in a TMA box of this thread's first stmatrix row. Rows of a box are kBoxN columns wide and swizzled over
// their whole width. XOR with 2 c moves the offset c columns to the right, where c is a multiple of 16.
template <typename Gemm>
__device__ __forceinline__ uint32_t store_offset() {
  const int lane = threadIdx.x % 32;
  const uint32_t offset = (lane % 16 * Gemm::kBoxN + lane / 16 * 8) * 2;
  return offset ^ ((offset >> 3) & (Gemm::kBoxN * 2 - 16));
}

// Brings the biases of a tile's columns to shared memory. They are read from memory early, and written to shared memory
// when the tile before is done with its own.
template <typename Gemm>
struct TileBias {
  static constexpr int kCount = Gemm::kParts * Gemm::kTileN;
  static constexpr int kThreads = Gemm::kConsumersOfTile * 128;
  static constexpr int kPerThread = (kCount + kThreads - 1) / kThreads;
  float values[kPerThread];

  __device__ __forceinline__ static int index(int i) { return threadIdx.x % kThreads + i * kThreads; }

  template <typename Tile>
  __device__ __forceinline__ void load(const TiledGemmArgs& args, const Tile& tile, int first_column) {
    using Element = typename Gemm::Element;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const void* bias = index(i) < Gemm::kTileN ? args.epilogue.bias : args.epilogue.up_bias;
      const int column = min(first_column + index(i) % Gemm::kTileN, args.n - 1);  // past the end nothing is stored
      values[i] = bias == nullptr
                      ? 0.0f
                      : static_cast<float>(__ldg(static_cast<const Element*>(bias) + tile.bias_index(column)));
    }
  }

  __device__ __forceinline__ void store(uint32_t shared) const {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (index(i) < kCount) store_shared_float(shared + index(i) * 4, values[i]);
    }
  }
};

// Calls take(i, accumulator plus bias) for a thread's accumulators of a step, from `first` on. The biases lie in shared
// memory, if there are any.
template <typename Gemm, typename Take>
__device__ __forceinline__ void for_each_biased(const float (&accumulator)[Gemm::kAccumulators], int first, bool biased,
                                                uint32_t shared, Take&& take) {
  if (biased) {
#pragma unroll
    for (int i = 0; i < Gemm::kStepN / 2; i += 4) {
      const float2 pair = load_shared_float2(shared + (i * 2 + threadIdx.x % 4 * 2) * 4);
#pragma unroll
      for (int j = i; j < i + 4; ++j) take(j, accumulator[first + j] + (j % 2 == 0 ? pair.x : pair.y));
    }
  } else {
#pragma unroll
    for (int i = 0; i < Gemm::kStepN / 2; ++i) take(i, accumulator[first + i]);
  }
}

template <typename Gemm>
__device__ __forceinline__ void write_boxes(const float (&value)[Gemm::kStepN / 2], uint32_t store) {
  using Element = typename Gemm::Element;
  const uint32_t thread_store = store + store_offset<Gemm>();
#pragma unroll
  for (int j = 0; j < Gemm::kStepN / 2; j += 8) {  // 16 columns
    const int box = j * 2 / Gemm::kBoxN;
    store_matrix_x4((thread_store ^ j * 2 % Gemm::kBoxN * 2) + box * Gemm::kBoxBytes,
                    round_pair<Element>(value[j], value[j + 1]), round_pair<Element>(value[j + 2], value[j + 3]),
                    round_pair<Element>(value[j + 4], value[j + 5]), round_pair<Element>(value[j + 6], value[j + 7]));
  }
}

// Sends what the warp wrote to (row, column) of the output; an outer product's to those of an expert.
template <typename Gemm>
__device__ __forceinline__ void send_boxes(const CUtensorMap& map, uint32_t store, int row, int column,
                                           int expert = 0) {
  fence_shared_to_async();
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
#pragma unroll
    for (int box = 0; box < Gemm::kStepN / Gemm::kBoxN; ++box) {
      const uint32_t from = store + box * Gemm::kBoxBytes;
      if constexpr (Gemm::kOuter) {
        tma_store_to(expert, &map, from, column + box * Gemm::kBoxN, row);
      } else {
        tma_store(&map, from, column + box * Gemm::kBoxN, row);
      }
    }
    tma_store_commit();
  }
}

// A buffer of this warp, which the TMA is done with.
template <typename Gemm>
__device__ __forceinline__ uint32_t next_buffer(uint32_t stores, int& buffer) {
  if (threadIdx.x % 32 == 0) tma_store_wait_read<Gemm::kStoreBuffers - 1>();
  __syncwarp();
  const uint32_t store = stores + buffer * Gemm::kStoreBytes;
  buffer = buffer + 1 == Gemm::kStoreBuffers ? 0 : buffer + 1;
  return store;
}

// Stores the warp's rows of the tile, 16 of every 64. Leaves the accumulators undefined.
template <typename Gemm, Activation A>
__device__ __forceinline__ void store_tile(const typename Gemm::Args& args, Accumulator<Gemm>& accumulator,
                                           uint32_t tile_bias, uint32_t stores, int& buffer, int first_row,
                                           int first_column, int expert = 0) {
  constexpr int kCount = Gemm::kStepN / 2;  // results of a thread in a step
  constexpr int kShift = Gemm::kAccumulators / Gemm::kChunks;
  constexpr int kLastChunk = Gemm::kMmas * Gemm::kChunks - 1;
#pragma unroll 1
  for (int chunk = 0; chunk <= kLastChunk; ++chunk) {
    const int row = first_row + chunk / Gemm::kChunks * 64;
    const int chunk_column = chunk % Gemm::kChunks * Gemm::kChunkN;
    const int column = first_column + chunk_column;
    const uint32_t bias = tile_bias + chunk_column * 4;
    uint32_t store = 0;
#pragma unroll
    for (int step = 0; step < Gemm::kSteps; ++step) {
      const int step_column = Gemm::step_column(step);
      const int first = step_column / 2;  // accumulator
      float value[kCount];
      const auto sums = [&](Operand operand, auto&& take) {
        if (operand == Operand::kGate) {
          for_each_biased<Gemm>(accumulator[0], first, args.epilogue.bias != nullptr, bias + step_column * 4, take);
        } else {
          for_each_biased<Gemm>(accumulator[0], Gemm::kAccumulators / 2 + first, args.epilogue.up_bias != nullptr,
                                bias + (Gemm::kTileN + step_column) * 4, take);
        }
      };
      GluEpilogue<Gemm::kProduct>::apply(value, FixedActivation<A, typename Gemm::Element>(), sums);
      // The boxes of the last step are sent only now, so that the fence does not have to wait until they are written.
      if (step > 0) send_boxes<Gemm>(args.out, store, row, column + Gemm::step_column(step - 1), expert);
      if constexpr (Gemm::kKept) {
        const auto keep = [&](Operand operand, const CUtensorMap& map) {
          float kept[kCount];
          sums(operand, [&](int i, float sum) { kept[i] = sum; });
          const uint32_t kept_store = next_buffer<Gemm>(stores, buffer);
          write_boxes<Gemm>(kept, kept_store);
          send_boxes<Gemm>(map, kept_store, row, column + step_column);
        };
        keep(Operand::kGate, args.gate);
        if constexpr (Gemm::kGated) keep(Operand::kUp, args.up);
      }
      store = next_buffer<Gemm>(stores, buffer);
      write_boxes<Gemm>(value, store);
    }
    send_boxes<Gemm>(args.out, store, row, column + Gemm::step_column(Gemm::kSteps - 1), expert);
#pragma unroll
    for (int i = 0; i < kLastChunk * kShift; ++i) {  // the next chunk's accumulators, where the loop's body wants them
      const int next = i + kShift;
      accumulator[i / Gemm::kAccumulators][i % Gemm::kAccumulators] =
          accumulator[next / Gemm::kAccumulators][next % Gemm::kAccumulators];
    }
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace fused_mlp::sm90
