#pragma once

#include <cstdint>
#include <optional>

#include "../../operands/dlpack.h"
#include "../direct/plain.h"

namespace fused_mlp {

// A router and the experts that it chooses from, without tensors of torch's, and checked as far as dtypes and devices
// go. What is read of Python's tensors holds as long as these live.
struct PlainMixture {
  DType dtype;
  int32_t device;
  Matrix x;
  int64_t rows, width;
  dlpack::Tensor router, gate_up, down;
  std::optional<dlpack::Tensor> gate_up_bias, down_bias;
  int64_t top_k;
  bool normalized, narrow;  // as top_k_router has them
  // As sigmoid_router has them, where there is a bias.
  std::optional<dlpack::Tensor> router_bias;
  int64_t groups, top_groups;
  double scaling;
  int64_t activation;
  bool gated, interleaved, transposed;
  std::optional<double> limit;
  double up_offset;
  Matrix residual;  // is added to the result; its data is null where there is none
  Norm first;       // of x
};

// Computes it into adjacent rows, on a GPU by torch's current stream. False where ops have to be called. Throws where
// operands do not fit.
bool mixture_directly(const PlainMixture& mixture, void* out);

}  // namespace fused_mlp
