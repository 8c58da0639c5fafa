#include <algorithm>
#include <bit>

#include "decode.cuh"

namespace fused_mlp {

using namespace decoding;

namespace {

template <bool kNested>
cudaError_t launch(const CodedElements& weight, void* out, DType dtype, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(ceil_div(weight.elements, kThreads * kCodes * kVectors));
  const auto block = static_cast<uint64_t>(weight.block);
  const bool vectors = std::has_single_bit(block) && block >= kCodes &&
                       reinterpret_cast<uintptr_t>(weight.data) % 4 == 0 &&
                       reinterpret_cast<uintptr_t>(out) % kVectorBytes == 0;
  return visit_dtype(dtype, [&]<typename T>(T*) {
    if (vectors) {
      decode_vectors_kernel<T, kNested>
          <<<blocks, kThreads, 0, stream>>>(weight, std::countr_zero(block), static_cast<T*>(out));
    } else {
      decode_kernel<T, kNested><<<blocks, kThreads, 0, stream>>>(weight, static_cast<T*>(out));
    }
    return cudaGetLastError();
  });
}

}  // namespace

cudaError_t launch_decode(const CodedElements& weight, void* out, DType dtype, cudaStream_t stream) {
  if (weight.elements == 0) return cudaSuccess;
  const bool nested = weight.scales.nested_code != nullptr;
  return nested ? launch<true>(weight, out, dtype, stream) : launch<false>(weight, out, dtype, stream);
}

namespace {

template <Coding kCoding>
cudaError_t launch_blocked(const BlockedElements& weight, void* out, DType dtype, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(ceil_div(weight.n * weight.k, kThreads * kCodes * kVectors));
  const dim3 grid(static_cast<unsigned>(ceil_div(weight.n, kRows)),
                  static_cast<unsigned>(ceil_div(weight.k, kRowVectors * kCodes)));
  constexpr int64_t kMost = 1 << 25;  // maximum columns of whole vectors in the grid
  const bool vectors = weight.k % kCodes == 0 && weight.k <= kMost &&
                       (weight.block % kCodes == 0 || weight.block >= weight.k) &&
                       reinterpret_cast<uintptr_t>(weight.data) % vector_bytes(kCoding) == 0 &&
                       reinterpret_cast<uintptr_t>(out) % kVectorBytes == 0;
  return visit_dtype(dtype, [&]<typename T>(T*) {
    if (vectors) {
      decode_blocked_vectors_kernel<T, kCoding><<<grid, kThreads, 0, stream>>>(weight, static_cast<T*>(out));
    } else {
      decode_blocked_kernel<T, kCoding><<<blocks, kThreads, 0, stream>>>(weight, static_cast<T*>(out));
    }
    return cudaGetLastError();
  });
}

}  // namespace

cudaError_t launch_decode(const BlockedElements& weight, void* out, DType dtype, cudaStream_t stream) {
  if (weight.n * weight.k == 0) return cudaSuccess;
  switch (weight.coding) {
    case Coding::kInt4:
      return launch_blocked<Coding::kInt4>(weight, out, dtype, stream);
    case Coding::kFp8:
      return launch_blocked<Coding::kFp8>(weight, out, dtype, stream);
    case Coding::kInt8:
      return launch_blocked<Coding::kInt8>(weight, out, dtype, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

cudaError_t launch_decode_tiles(const PackedWeight& weight, void* out, DType dtype, cudaStream_t stream) {
  if (weight.elements() == 0) return cudaSuccess;
  const Tiles tiles(weight);
  const auto* const words = static_cast<const uint32_t*>(weight.data);
  const auto* const scales = static_cast<const uint32_t*>(weight.scales);
  const auto of_row = static_cast<unsigned>(tiles.k / Tiles::kColumns);
  const dim3 grid(static_cast<unsigned>(tiles.n / Tiles::kRows), ceil_div(of_row, unsigned{kRows}));
  return visit_dtype(dtype, [&]<typename T>(T*) {
    decode_tiles_kernel<<<grid, kThreads, 0, stream>>>(words, scales, weight.n, weight.k, of_row,
                                                       static_cast<int>(weight.block), static_cast<T*>(out));
    return cudaGetLastError();
  });
}

cudaError_t launch_unnest(const NestedScales (&nested)[kMostNested], cudaStream_t stream) {
  AllNested all;
  int64_t most = 0;
  for (int i = 0; i < kMostNested; ++i) {
    all.of[i] = nested[i];
    most = std::max(most, nested[i].count);
  }
  if (most == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(ceil_div(most, kThreads * kScales)), kMostNested);
  unnest_kernel<<<grid, kThreads, 0, stream>>>(all);
  return cudaGetLastError();
}

}  // namespace fused_mlp
