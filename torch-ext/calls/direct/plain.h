#pragma once

#include <cstdint>
#include <functional>

#include "../../operands/packed.h"
#include "../../ops/norm.h"

// An MLP, and what is around it in its block, as its kernels see it: without tensors, and checked.
namespace fused_mlp {

// act(x weight^T + bias), times (x up_weight^T + up_bias) where there is one. Weights are [out, in], and their rows, as
// the biases, have adjacent elements. Where `transposed`, memory holds them as [in, out], and the matrices describe
// that. A bias may be null. Quantised weights are `packed`, and `up_packed`, in their place: null where there are none.
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
  int count;  // how many layers there are
  // A residual makes it the block of torch_binding.h; its data is null where there is none.
  Matrix residual;
  Norm first, last;
};

// A norm by itself, which norm.h has, of rows of x.
struct PlainNorm {
  DType dtype;
  int32_t device;
  Matrix x;
  int64_t rows, cols;
  Norm norm;
};

// Computes it into adjacent rows, on a GPU by torch's current stream. False where the op has to be called: on another
// device than the current one.
bool norm_directly(const PlainNorm& norm, void* out);

// True if there may be a plan for so many rows, whatever the layers are.
bool may_be_direct(DType dtype, int64_t rows);

// Returns what computes an MLP into adjacent rows, on a GPU by torch's current stream. It is empty where the op has to
// be called: there is no such code for its layers, or the MLP is on another device than the current one. Quantised
// weights must live until it has computed.
std::function<void(void* out)> plan_direct(const PlainMlp& mlp);

}  // namespace fused_mlp
