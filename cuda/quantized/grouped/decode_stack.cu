#include <algorithm>

#include "decode_stack.cuh"

namespace fused_mlp {

cudaError_t launch_decode(const StackElements& weight, void* out, DType dtype, cudaStream_t stream) {
  const int64_t vectors = weight.experts * weight.rows * ceil_div(weight.k, stacks::kVector);
  if (vectors == 0) return cudaSuccess;
  constexpr int64_t kMost = 1 << 25;  // maximum columns of whole vectors in the grid
  const bool whole = weight.k % stacks::kVector == 0 && weight.k <= kMost &&
                     (weight.block % stacks::kVector == 0 || weight.block >= weight.k) &&
                     reinterpret_cast<uintptr_t>(weight.data) % stacks::kVector == 0 &&
                     reinterpret_cast<uintptr_t>(out) % kVectorBytes == 0;
  const dim3 grid(static_cast<unsigned>(ceil_div(weight.experts * weight.rows, stacks::kRows)),
                  static_cast<unsigned>(ceil_div(weight.k, stacks::kRowVectors * stacks::kVector)));
  const int64_t blocks = ceil_div(vectors, stacks::kThreads);
  return visit_dtype(dtype, [&]<typename T>(T*) {
    T* const to = static_cast<T*>(out);
    if (whole && weight.coding == StackCoding::kFp8) {
      stacks::decode_stack_vectors_kernel<T, StackCoding::kFp8><<<grid, stacks::kThreads, 0, stream>>>(weight, to);
    } else if (whole) {
      stacks::decode_stack_vectors_kernel<T, StackCoding::kMxfp4><<<grid, stacks::kThreads, 0, stream>>>(weight, to);
    } else {
      constexpr int64_t kMostBlocks = 1 << 16;
      stacks::decode_stack_kernel<T>
          <<<static_cast<unsigned>(std::min(blocks, kMostBlocks)), stacks::kThreads, 0, stream>>>(weight, to);
    }
    return cudaGetLastError();
  });
}

}  // namespace fused_mlp
