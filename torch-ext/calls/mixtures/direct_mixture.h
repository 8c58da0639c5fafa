#pragma once

#include <cstdint>
#include <optional>

#include "../../operands/dlpack.h"
#include "../direct/plain.h"

namespace fused_mlp {

// A router and its experts, without torch tensors; dtypes and devices are checked. The pointers into Python's tensors
// are valid as long as the tensors live.
struct PlainMixture {
  DType dtype;
  int32_t device;
  Matrix x;
  int64_t rows, width;
  dlpack::Tensor router, gate_up, down;
  std::optional<dlpack::Tensor> gate_up_bias, down_bias;
  int64_t top_k;
  bool normalized, narrow;  // as in top_k_router
  // As in sigmoid_router, if there is a bias.
  std::optional<dlpack::Tensor> router_bias;
  int64_t groups, top_groups;
  double scaling;
  int64_t activation;
  bool gated, interleaved, transposed;
  std::optional<double> limit;
  double up_offset;
  Matrix residual;  // added to the result; its data is null if there is none
  Norm first;       // of x
};

// Computes it into adjacent rows, on a GPU on torch's current stream. False if ops have to be called. Throws if
// operands do not fit.
bool mixture_directly(const PlainMixture& mixture, void* out);

}  // namespace fused_mlp
