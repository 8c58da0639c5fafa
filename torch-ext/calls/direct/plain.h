#pragma once

#include <cstdint>
#include <functional>

#include "../../operands/packed.h"
#include "../../ops/norms/norm.h"

// An MLP and its block as the kernels see them: without tensors, and checked.
namespace fused_mlp {

// act(x weight^T + bias), times (x up_weight^T + up_bias) if there is an up weight. Weights are [out, in]; the elements
// of their rows, and of the biases, are adjacent. If `transposed`, memory holds them as [in, out], which the matrices
// describe. A bias may be null. `packed` and `up_packed` replace quantised weights; null if there are none.
struct PlainLayer {
  Matrix weight, up_weight;
  bool transposed;
  const void *bias, *up_bias;
  int64_t out;
  int64_t activation;
  const PackedWeight *packed, *up_packed;
};

struct PlainMlp {
  DType dtype;
  int32_t device;
  Matrix x;
  int64_t rows, in;
  PlainLayer layers[2];
  int count;  // number of layers
  // A residual makes it the block of torch_binding.h; its data is null if there is none.
  Matrix residual;
  Norm first, last;
};

// A standalone norm of rows of x, of a kind in norm.h.
struct PlainNorm {
  DType dtype;
  int32_t device;
  Matrix x;
  int64_t rows, cols;
  Norm norm;
};

// Computes it into adjacent rows, on a GPU on torch's current stream. False if the op has to be called, because the
// device is not the current one.
bool norm_directly(const PlainNorm& norm, void* out);

// True if there may be a plan for this many rows, whatever the layers are.
bool may_be_direct(DType dtype, int64_t rows);

// Returns a function that computes an MLP into adjacent rows, on a GPU on torch's current stream. It is empty if the op
// has to be called: its layers are not supported, or the MLP is not on the current device. Quantised weights must live
// until it has run.
std::function<void(void* out)> plan_direct(const PlainMlp& mlp);

}  // namespace fused_mlp
