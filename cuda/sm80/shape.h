// The shape of a kernel of sm_80: a CTA's products, and its shared memory for them. Device code and the choice
// of a kernel know it from here.
#pragma once

namespace fused_mlp::sm80 {

// Shared memory that the system takes of each CTA's part.
constexpr int kSystemBytes = 1024;

// The shared memory of the GPUs with the least, in all and for one CTA: 8.6, 8.9 and 12.x.
constexpr int kLeastSharedOfMultiprocessor = 100 * 1024;
constexpr int kLeastSharedOfCta = kLeastSharedOfMultiprocessor - kSystemBytes;

// Two sets of rows, which are the M and the N side of the tensor cores' instructions, in blocks of block_k elements.
// The warps of a CTA share the rows of both sides, and warps_k of them the elements of each block.
struct Shape {
  int rows_m, rows_n, block_k, warps_m, warps_n, warps_k, stages;
  int ctas = 1;  // at most on a multiprocessor, of a streamed kernel

  constexpr int threads() const { return warps_m * warps_n * warps_k * 32; }
  constexpr int stage_bytes() const { return (rows_m + rows_n) * block_k * 2; }
  constexpr int ring_bytes() const { return stages * stage_bytes(); }
  bool operator==(const Shape&) const = default;
};

constexpr Shape tiled_shape(int block_m, int block_n, int block_k, int warps_m, int warps_n, int stages) {
  return {block_m, block_n, block_k, warps_m, warps_n, 1, stages};
}
// CTAs of eight warps are alone on a multiprocessor, and compute one tile after the other. Of smaller ones there are
// two.
constexpr bool is_persistent(const Shape& shape) { return shape.threads() > 128; }
// The biases of a tile's columns lie behind the ring, and those of the next tile behind them.
constexpr int tiled_shared_bytes(const Shape& shape) {
  return shape.ring_bytes() + shape.rows_n * 2 * (is_persistent(shape) ? 2 : 1);
}

// The warps of a streamed kernel share k, or the weight rows, or both. Sums of those that share k meet behind the ring,
// those of some tokens at a time.
constexpr Shape streamed_shape(int parts, int tokens, int columns, int block_k, int warps_m, int warps_k, int ctas,
                               int stages) {
  return {parts * columns, tokens, block_k, warps_m, 1, warps_k, stages, ctas};
}
constexpr int streamed_round(int tokens) { return tokens < 16 ? tokens : 16; }
constexpr int streamed_sum_stride(const Shape& shape) {
  return shape.rows_m + 4;
}  // floats; keeps lanes on distinct banks
constexpr int streamed_shared_bytes(const Shape& shape) {
  const int sums = shape.warps_k * streamed_round(shape.rows_n) * streamed_sum_stride(shape) * 4;
  return shape.ring_bytes() + (shape.warps_k > 1 ? sums : 0);
}

// The CTAs of which a multiprocessor's shared memory has room for.
constexpr int resident_ctas(int shared_bytes, int shared_of_multiprocessor) {
  return shared_of_multiprocessor / (shared_bytes + kSystemBytes);
}
constexpr int streamed_ctas(const Shape& shape, int shared_of_multiprocessor) {
  const int resident = resident_ctas(streamed_shared_bytes(shape), shared_of_multiprocessor);
  return resident < shape.ctas ? resident : shape.ctas;
}

}  // namespace fused_mlp::sm80
