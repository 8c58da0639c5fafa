// The steps of training between the products of experts: activation and gate, if no epilogue computes them, and the
// sums of rows that are the gradients of biases. They run on the current device.
#pragma once

#include <cuda_runtime_api.h>

#include "../../gemm/grouped.h"

namespace fused_mlp {

// The hidden values of rows sorted into blocks of kTiledBlock: act(gate) * up, or act of everything if there is no
// gate.
struct ExpertGates {
  RowBlocks blocks;
  int64_t activation;
  bool gated, interleaved;  // gates and ups are interleaved; otherwise gates come first
  GateLimits limits;
  int width;            // hidden features, a multiple of 8
  const void* gate_up;  // [rows, width], or [rows, 2 width] if gated: sums before the limits, biases included
  void* hidden;         // [rows, width]
  DType dtype;
};

// From the gradient of the hidden values, which does not include the row's weight: the gradients of `gate_up`, the
// hidden values times that weight, and the gradient of the weight. Rows that are not filled are zeroed up to a multiple
// of kZeroRows.
struct ExpertGateGradients {
  ExpertGates gates;       // `hidden` is written
  const void* gradient;    // [rows, width], may be `hidden`
  void* gate_up_gradient;  // like gate_up, and may be gate_up
  const float* row_weights;
  float* row_sums;  // [rows]
  // The gradient of the result, and the last biases, [rows, features] and [experts, features], which contribute to the
  // gradient of the weight. Null if there are none.
  const void* result_gradient;
  const void* down_bias;
  int features;
};

// out [experts, columns] = the sums of every expert's rows, weighted if there are weights.
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
