// A CTA copies a box of 16 groups, 16 rows and 16 columns at a time, through shared memory: it reads and writes along
// whichever dimension lies together, whole sectors.
#pragma once

#include "routes.cuh"
#include "stack_copies.h"

namespace fused_mlp {

constexpr int kCopyThreads = 256, kCopyBox = 16;

// The place in a box of an element by its number, which counts first along `fastest`.
__device__ __forceinline__ int3 place_in_box(int number, int fastest) {
  const int first = number % kCopyBox, second = number / kCopyBox % kCopyBox, third = number / (kCopyBox * kCopyBox);
  if (fastest == 0) return make_int3(first, third, second);
  return fastest == 1 ? make_int3(third, first, second) : make_int3(third, second, first);
}

__device__ __forceinline__ int together(const Stack& stack) {
  return stack.strides[2] == 1 ? 2 : stack.strides[1] == 1 ? 1 : 0;
}

__device__ __forceinline__ int64_t offset(const Stack& stack, int group, int row, int column) {
  return group * stack.strides[0] + row * stack.strides[1] + column * stack.strides[2];
}

__device__ __forceinline__ float load_element(const Stack& stack, int64_t at) {
  switch (stack.type) {
    case WeightType::kFloat16:
      return __half2float(static_cast<const __half*>(stack.data)[at]);
    case WeightType::kBFloat16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(stack.data)[at]);
    default:
      return static_cast<const float*>(stack.data)[at];
  }
}

__device__ __forceinline__ void store_element(const Stack& stack, int64_t at, float value) {
  switch (stack.type) {
    case WeightType::kFloat16:
      static_cast<__half*>(stack.data)[at] = __float2half_rn(value);
      break;
    case WeightType::kBFloat16:
      static_cast<__nv_bfloat16*>(stack.data)[at] = __float2bfloat16_rn(value);
      break;
    default:
      static_cast<float*>(stack.data)[at] = value;
  }
}

__global__ void __launch_bounds__(kCopyThreads) stack_copies_kernel(const __grid_constant__ StackCopies args) {
  __shared__ float box[kCopyBox][kCopyBox + 1][kCopyBox + 1];
  const StackCopy& copy = args.copies[blockIdx.y];
  const int columns = (copy.sizes[2] + kCopyBox - 1) / kCopyBox, rows = (copy.sizes[1] + kCopyBox - 1) / kCopyBox;
  const int boxes = (copy.sizes[0] + kCopyBox - 1) / kCopyBox * rows * columns;
  const int from = together(copy.from), to = together(copy.to);
  for (int index = blockIdx.x; index < boxes; index += gridDim.x) {
    const int column = index % columns * kCopyBox, row = index / columns % rows * kCopyBox;
    const int group = index / (columns * rows) * kCopyBox;
#pragma unroll 4
    for (int i = threadIdx.x; i < kCopyBox * kCopyBox * kCopyBox; i += kCopyThreads) {
      const int3 at = place_in_box(i, from);
      float value = 0.0f;
      if (group + at.x < copy.sizes[0] && row + at.y < copy.from_rows && column + at.z < copy.from_columns) {
        const bool of_slots = args.of_slots.index != nullptr;
        const int source = of_slots ? max(expert_of(args.of_slots, group + at.x), 0) : group + at.x;
        value = copy.scale * load_element(copy.from, offset(copy.from, source, row + at.y, column + at.z));
      }
      box[at.x][at.y][at.z] = value;
    }
    __syncthreads();
#pragma unroll 4
    for (int i = threadIdx.x; i < kCopyBox * kCopyBox * kCopyBox; i += kCopyThreads) {
      const int3 at = place_in_box(i, to);
      if (group + at.x < copy.sizes[0] && row + at.y < copy.sizes[1] && column + at.z < copy.sizes[2]) {
        store_element(copy.to, offset(copy.to, group + at.x, row + at.y, column + at.z), box[at.x][at.y][at.z]);
      }
    }
    __syncthreads();
  }
}

}  // namespace fused_mlp
