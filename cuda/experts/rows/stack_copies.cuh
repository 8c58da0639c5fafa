// A CTA copies a box of 16 groups, 16 rows and 16 columns at a time through shared memory. It reads and writes whole
// sectors along the contiguous dimension. A thread has a fixed position along that dimension and another one, and
// iterates over the third, so its addresses have a constant step and its loads are in flight together.
#pragma once

#include <type_traits>

#include "routes.cuh"
#include "stack_copies.h"

namespace fused_mlp {

constexpr int kCopyBox = 16, kCopyThreads = kCopyBox * kCopyBox;

struct CopyBox {
  float values[kCopyBox][kCopyBox + 1][kCopyBox + 1];  // groups, rows, columns
  int64_t sources[kCopyBox];                           // start of the groups that are read, in elements
};

// The first group, row and column of a box.
struct BoxPlace {
  int group, row, column;
};

__device__ __forceinline__ int dimension_together(const Stack& stack) {
  return stack.strides[2] == 1 ? 2 : stack.strides[1] == 1 ? 1 : 0;
}

// Calls visit(element's offset from the group's source, its value in the box, whether it exists) for the elements of a
// thread, where dimension kTogether is the contiguous one. `offset_of_group` is where a group of the box begins.
template <int kTogether, typename OffsetOfGroup, typename Visit>
__device__ __forceinline__ void walk_box(const Stack& stack, CopyBox& box, const BoxPlace& place, const int (&sizes)[3],
                                         int thread, OffsetOfGroup&& offset_of_group, Visit&& visit) {
  const int first = thread % kCopyBox, second = thread / kCopyBox;
  const int row = kTogether == 2 ? second : first, column = kTogether == 2 ? first : second;  // unless groups are
  if constexpr (kTogether == 0) {
    const int64_t begin =
        offset_of_group(first) + place.row * stack.strides[1] + (place.column + column) * stack.strides[2];
    const bool inside = place.group + first < sizes[0] && place.column + column < sizes[2];
#pragma unroll
    for (int i = 0; i < kCopyBox; ++i) {
      visit(begin + i * stack.strides[1], box.values[first][i][column], inside && place.row + i < sizes[1]);
    }
  } else {
    const int64_t begin = (place.row + row) * stack.strides[1] + (place.column + column) * stack.strides[2];
    const bool inside = place.row + row < sizes[1] && place.column + column < sizes[2];
#pragma unroll
    for (int i = 0; i < kCopyBox; ++i) {
      visit(begin + offset_of_group(i), box.values[i][row][column], inside && place.group + i < sizes[0]);
    }
  }
}

// Calls visit(pointer to the elements of a stack, the contiguous dimension as a constant).
template <typename Visit>
__device__ __forceinline__ void visit_stack(const Stack& stack, Visit&& visit) {
  const auto of_type = [&](auto* data) {
    switch (dimension_together(stack)) {
      case 0:
        return visit.template operator()<0>(data);
      case 1:
        return visit.template operator()<1>(data);
      default:
        return visit.template operator()<2>(data);
    }
  };
  switch (stack.type) {
    case WeightType::kFloat16:
      return of_type(static_cast<__half*>(stack.data));
    case WeightType::kBFloat16:
      return of_type(static_cast<__nv_bfloat16*>(stack.data));
    default:
      return of_type(static_cast<float*>(stack.data));
  }
}

__device__ __forceinline__ void read_box(const StackCopy& copy, CopyBox& box, const BoxPlace& place, int thread) {
  const int sizes[3] = {copy.sizes[0], copy.from_rows, copy.from_columns};
  visit_stack(copy.from, [&]<int kTogether>(auto* data) {
    walk_box<kTogether>(
        copy.from, box, place, sizes, thread, [&](int group) { return box.sources[group]; },
        [&](int64_t at, float& value, bool is_there) {
          value = is_there ? copy.scale * static_cast<float>(data[at]) : 0.0f;
        });
  });
}

__device__ __forceinline__ void write_box(const StackCopy& copy, CopyBox& box, const BoxPlace& place, int thread) {
  visit_stack(copy.to, [&]<int kTogether>(auto* data) {
    walk_box<kTogether>(
        copy.to, box, place, copy.sizes, thread, [&](int group) { return (place.group + group) * copy.to.strides[0]; },
        [&](int64_t at, float& value, bool is_there) {
          if (is_there) data[at] = static_cast<std::remove_reference_t<decltype(*data)>>(value);
        });
  });
}

__global__ void __launch_bounds__(kCopyThreads) stack_copies_kernel(const __grid_constant__ StackCopies args) {
  __shared__ CopyBox box;
  const StackCopy& copy = args.copies[blockIdx.y];
  const int columns = (copy.sizes[2] + kCopyBox - 1) / kCopyBox, rows = (copy.sizes[1] + kCopyBox - 1) / kCopyBox;
  const int boxes = (copy.sizes[0] + kCopyBox - 1) / kCopyBox * rows * columns;
  const int thread = static_cast<int>(threadIdx.x);
  for (int index = blockIdx.x; index < boxes; index += gridDim.x) {
    const BoxPlace place{index / (columns * rows) * kCopyBox, index / columns % rows * kCopyBox,
                         index % columns * kCopyBox};
    if (thread < kCopyBox) {
      const int group = min(place.group + thread, copy.sizes[0] - 1);
      const bool of_slots = args.of_slots.index != nullptr;
      box.sources[thread] = copy.from.strides[0] * (of_slots ? max(expert_of(args.of_slots, group), 0) : group);
    }
    __syncthreads();
    read_box(copy, box, place, thread);
    __syncthreads();
    write_box(copy, box, place, thread);
    __syncthreads();
  }
}

}  // namespace fused_mlp
