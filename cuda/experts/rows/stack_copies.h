// Copies stacks of matrices with a change of layout and dtype: the factors of experts' adapters, which have a library's
// layout, and their gradients.
#pragma once

#include <cuda_runtime_api.h>

#include "../../gemm/grouped.h"

namespace fused_mlp {

// Matrices [groups, rows, columns], with strides in elements.
struct Stack {
  void* data;
  WeightType type;  // not float64
  int64_t strides[3];
};

// to = scale * from, rounded; zeros past the rows of `from`.
struct StackCopy {
  Stack from, to;
  int sizes[3];  // those of `to`
  int from_rows, from_columns;
  float scale;
};

constexpr int kMostStackCopies = 4;

struct StackCopies {
  StackCopy copies[kMostStackCopies];
  int count;
  // If there is an index, group i is copied from the expert of slot i.
  Routes of_slots;
};

// In one launch, on the current device.
cudaError_t launch_stack_copies(const StackCopies& copies, cudaStream_t stream);

}  // namespace fused_mlp
