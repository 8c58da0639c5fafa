#pragma once

#include <cstdint>

#include "../../operands/matrix.h"

// Rotary embeddings of queries and keys, for the kernels of every backend.
namespace fused_mlp {

// Heads [batch, heads, tokens, features], with the strides of the first three dimensions; features are adjacent.
struct Heads {
  const void* in;
  void* out;
  int64_t heads;
  int64_t in_strides[3], out_strides[3];
};

// Cosines or sines [batch, tokens, features].
struct Angles {
  const void* data;
  int64_t of_batch, of_token;  // strides
};

// out = in cos + (-second half of in, first half of in) sin; or, if `inverse`, the gradient of in from that of out.
struct Rotary {
  Heads of[2];  // queries and keys
  Angles cos, sin;
  int64_t batch, tokens, half;
  DType dtype;
  bool inverse;
};

}  // namespace fused_mlp
