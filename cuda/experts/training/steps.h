// The steps of training beside the products of experts: what is between these where no epilogue does it, and the sums
// of rows that are the gradients of biases. On the current device.
#pragma once

#include <cuda_runtime_api.h>

#include "../../gemm/grouped.h"

namespace fused_mlp {

// The hidden values of sorted rows, in blocks of kTiledBlock: act(gate) * up, or act of all where there is no gate.
struct ExpertGates {
  RowBlocks blocks;
  int64_t activation;
  bool gated, interleaved;  // gates lie before ups, or in turns with them
  GateLimits limits;
  int width;            // hidden features, a multiple of 8
  const void* gate_up;  // [rows, width], or [rows, 2 width] where gated: sums before the limits, biases included
  void* hidden;         // [rows, width]
  DType dtype;
};

// From the gradient of the hidden values, which leaves out the row's weight: those of `gate_up`, the hidden values
// times that weight, and the gradient of the weight. Of rows that are not filled zeros are written up to a whole
// kZeroRows.
struct ExpertGateGradients {
  ExpertGates gates;       // whose `hidden` is written
  const void* gradient;    // [rows, width], may be `hidden`
  void* gate_up_gradient;  // as gate_up, which it may be
  const float* row_weights;
  float* row_sums;  // [rows]
  // The gradient of the result, and the last biases, [rows, features] and [experts, features]: what these add to the
  // gradient of the weight. Null where there are none.
  const void* result_gradient;
  const void* down_bias;
  int features;
};

// out [experts, columns] = the sums of every expert's rows, times their weights where there are some.
struct ExpertSums {
  const RowRange* ranges;
  int experts;
  const void* rows;  // [., columns]
  int columns;       // a multiple of 8
  const float* row_weights;
  void* out;
  DType dtype;
};

cudaError_t launch_expert_gates(const ExpertGates& gates, int64_t rows, cudaStream_t stream);
cudaError_t launch_expert_gate_gradients(const ExpertGateGradients& gradients, int64_t rows, cudaStream_t stream);
cudaError_t launch_expert_sums(const ExpertSums& sums, cudaStream_t stream);

}  // namespace fused_mlp
