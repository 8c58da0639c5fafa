// Kernels that decode whole weights, and nested scales.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../../../torch-ext/operands/matrix.h"
#include "../problem.h"

namespace fused_mlp {

// The scales of a weight's blocks: floats, or bytes if there is a nested_code.
struct CodedScales {
  const void* scales;
  const float* nested_scales = nullptr;
  const float* nested_code = nullptr;
  int64_t nested_block = 1;
  float offset = 0.0f;
};

// torch-ext/ops/quantized.h defines how values and codes are packed, and their meaning. Any block and any alignment.
struct CodedElements {
  const uint8_t* data;
  const float* code;
  CodedScales scales;
  int64_t elements, block;
};

// A weight with one scale for each block of block_rows x block values. For int4 k is even.
struct BlockedElements {
  Coding coding;
  const uint8_t* data;
  const float* scales;
  int64_t n, k, block_rows, block;
  float factor;  // for all scales
};

// Writes all elements, rounded to the dtype.
cudaError_t launch_decode(const CodedElements& weight, void* out, DType dtype, cudaStream_t stream);
cudaError_t launch_decode(const BlockedElements& weight, void* out, DType dtype, cudaStream_t stream);
cudaError_t launch_decode_tiles(const PackedWeight& weight, void* out, DType dtype, cudaStream_t stream);

// Nested scales to be written as floats: `count` of them.
struct NestedScales {
  CodedScales scales;
  int64_t count = 0;
  float* out = nullptr;
};
constexpr int kMostNested = 3;  // the weights of a gated MLP
cudaError_t launch_unnest(const NestedScales (&nested)[kMostNested], cudaStream_t stream);

}  // namespace fused_mlp
