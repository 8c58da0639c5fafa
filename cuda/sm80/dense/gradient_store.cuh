// The store of a tile of the gradient of act(gate) * up. It reads gate and up, and stores the gradients of both and the
// value itself; the tile's gradient is never stored.
//
// Each warp puts its sums into shared memory, 16 rows at a time, and reads them back eight adjacent columns at a time,
// so that everything else is read and written in 16-byte chunks, and by the same lane: gradients may overwrite gate and
// up.
#pragma once

#include "../../gemm/epilogue.cuh"
#include "../main_loop.cuh"
#include "tiled_store.cuh"

namespace fused_mlp::sm80 {

// Eight adjacent elements.
template <typename Element>
__device__ __forceinline__ void unpack(const uint4& bits, float (&values)[kPiece]) {
  using Pair = typename ElementTraits<Element>::Pair;
  const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = to_float2(*reinterpret_cast<const Pair*>(&words[i]));
    values[2 * i] = pair.x, values[2 * i + 1] = pair.y;
  }
}

template <typename Element>
__device__ __forceinline__ uint4 pack(const float (&values)[kPiece]) {
  return make_uint4(round_pair<Element>(values[0], values[1]), round_pair<Element>(values[2], values[3]),
                    round_pair<Element>(values[4], values[5]), round_pair<Element>(values[6], values[7]));
}

template <typename Element>
__device__ __forceinline__ uint4* piece_of(const Matrix& matrix, int row, int column) {
  return reinterpret_cast<uint4*>(static_cast<Element*>(matrix.data) + row * matrix.row_stride + column);
}

// Computes and stores the results of a chunk from the gradients in `gradient`.
template <typename Gemm>
__device__ __forceinline__ void store_gradient_piece(const typename Gemm::Args& args, const float (&gradient)[kPiece],
                                                     const uint4& gate_bits, const uint4& up_bits, int row,
                                                     int column) {
  using Element = typename Gemm::Element;
  constexpr bool kOfUp = Gemm::kProduct == Product::kGatedGradient;
  const TrainingMatrices& t = args.training;
  float gate[kPiece], up[kPiece], value[kPiece];
  unpack<Element>(gate_bits, gate);
  unpack<Element>(up_bits, up);
  visit_activation(args.epilogue.activation, [&]<Activation A>() {
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
      const GluGradient<A> made(gradient[i], gate[i], kOfUp ? up[i] : 1.0f);
      gate[i] = made.gate, up[i] = made.up, value[i] = made.value;
    }
  });
  *piece_of<Element>(t.gate_gradient, row, column) = pack<Element>(gate);
  if (kOfUp) *piece_of<Element>(t.up_gradient, row, column) = pack<Element>(up);
  if (args.out.data != nullptr) *piece_of<Element>(args.out, row, column) = pack<Element>(value);
}

// Stores the results of the warp's tile. Leaves the sums undefined.
template <typename Gemm>
__device__ __forceinline__ void store_gradients(const typename Gemm::Args& args, Accumulator<typename Gemm::Tile>& sums,
                                                uint32_t shared, int first_row, int first_column) {
  using Element = typename Gemm::Element;
  constexpr bool kOfUp = Gemm::kProduct == Product::kGatedGradient;
  constexpr int kPieces = Gemm::kWarpColumns / kPiece;  // chunks of a row
  constexpr int kOfLane = kMmaM * kPieces / 32;
  constexpr int kRowsApart = 32 / kPieces;  // rows between a lane's chunks
  constexpr int kStride = Gemm::kGradientStride * 4;
  const int lane = threadIdx.x % 32;
  const int column = first_column + lane % kPieces * kPiece;
#pragma unroll 1
  for (int i = 0; i < Gemm::kTilesM; ++i) {
    const int top = first_row + i * kMmaM + lane / kPieces;  // row of this lane's first chunk
    const auto present = [&](int each) { return top + each * kRowsApart < args.m && column < args.n; };
    uint4 gates[kOfLane] = {}, ups[kOfLane] = {};  // loaded while the sums are written to shared memory
#pragma unroll
    for (int each = 0; each < kOfLane; ++each) {
      if (!present(each)) continue;
      gates[each] = *piece_of<Element>(args.training.gate, top + each * kRowsApart, column);
      if (kOfUp) ups[each] = *piece_of<Element>(args.training.up, top + each * kRowsApart, column);
    }
    warp_sync();  // all lanes have read the previous rows
#pragma unroll
    for (int j = 0; j < Gemm::kTilesN; ++j) {
      const uint32_t place = shared + lane / 4 * kStride + (j * kMmaN + lane % 4 * 2) * 4;
      store_shared_float2(place, make_float2(sums[0][j][0], sums[0][j][1]));
      store_shared_float2(place + 8 * kStride, make_float2(sums[0][j][2], sums[0][j][3]));
    }
    warp_sync();
#pragma unroll 1
    for (int each = 0; each < kOfLane; ++each) {
      const uint32_t place = shared + (lane / kPieces + each * kRowsApart) * kStride + lane % kPieces * kPiece * 4;
      const float4 low = load_shared_float4(place), high = load_shared_float4(place + 16);
      const float gradient[kPiece] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
      if (present(each)) {
        store_gradient_piece<Gemm>(args, gradient, gates[0], ups[0], top + each * kRowsApart, column);
      }
#pragma unroll
      for (int next = 1; next < kOfLane; ++next) gates[next - 1] = gates[next], ups[next - 1] = ups[next];
    }
    move_up<typename Gemm::Tile>(sums);
  }
}

}  // namespace fused_mlp::sm80
