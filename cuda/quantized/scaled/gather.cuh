// Copies rounded rows of tokens, sorted by experts, to the places where the TMA would have put them.
#pragma once

#include "../../loads.cuh"
#include "layout.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

namespace fused_mlp {

// A thread copies 16 bytes of every kStep-th row, and the scale of one row.
template <typename Gemm>
struct ScaledGather {
  static constexpr int kThreads = 128, kPieces = Gemm::kBlockK / 16, kStep = kThreads / kPieces;
  static constexpr int kCopies = Gemm::kTileM / kStep;
  static_assert(kThreads == Gemm::kTileM && kStep % 8 == 0);

  const ScaledArgs& args;
  uint32_t pieces[kCopies];  // start of the thread's rows, in steps of 16 bytes
  int token;                 // the token whose scale it copies

  __device__ __forceinline__ static int thread() { return threadIdx.x - Gemm::kConsumers; }

  // Rows of a block that are not filled have a token too.
  __device__ __forceinline__ void find(const ScaledTile& tile) {
    const int* const tokens = args.experts.token_of_row + tile.row;
    token = load_fresh(tokens + thread());
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      pieces[i] =
          load_fresh(tokens + thread() / kPieces + i * kStep) * static_cast<uint32_t>(args.a_rows.row_bytes / 16);
    }
  }

  __device__ __forceinline__ void copy(const ScaledShared<Gemm>& shared, int stage, int block, int rows) const {
    const int row = thread() / kPieces, piece = thread() % kPieces;
    const int column = block * Gemm::kBlockK + piece * 16;
    const bool present = column < args.k;
    const uint8_t* const from = args.a_rows.data + (present ? column : 0);
    const uint32_t to = shared.a(stage) + row * Gemm::kBlockK + (piece ^ row % 8) * 16;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      if (i * kStep >= rows) break;
      sm90::copy_async(to + i * kStep * Gemm::kBlockK, from + uint64_t{pieces[i]} * 16, present ? 16 : 0);
    }
    sm90::copy_word_async(shared.scales(stage) + thread() * 4,
                          args.a_rows.scales + block * args.a_rows.scale_stride + token);
    sm90::arrive_with_copies(shared.full(stage));
  }
};

}  // namespace fused_mlp

#endif
