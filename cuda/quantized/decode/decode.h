// Kernels that decode: whole weights, and nested scales.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../../../torch-ext/operands/matrix.h"

namespace fused_mlp {

// The scales of a weight's blocks: float, or where there is a nested_code, bytes.
struct CodedScales {
  const void* scales;
  const float* nested_scales = nullptr;
  const float* nested_code = nullptr;
  int64_t nested_block = 1;
  float offset = 0.0f;
};

// torch-ext/ops/quantized.h says how values and codes are packed, and what they stand for. Any block, any alignment.
struct CodedElements {
  const uint8_t* data;
  const float* code;
  CodedScales scales;
  int64_t elements, block;
};

struct Fp8Elements {
  const uint8_t* data;
  const float* scales;
  int64_t n, k, block_rows, block;
};

// Writes all elements, rounded to the dtype.
cudaError_t launch_decode(const CodedElements& weight, void* out, DType dtype, cudaStream_t stream);
cudaError_t launch_decode(const Fp8Elements& weight, void* out, DType dtype, cudaStream_t stream);

// Scales that are written as floats: `count` of them.
struct NestedScales {
  CodedScales scales;
  int64_t count = 0;
  float* out = nullptr;
};
constexpr int kMostNested = 3;  // the weights of a gated MLP
cudaError_t launch_unnest(const NestedScales (&nested)[kMostNested], cudaStream_t stream);

}  // namespace fused_mlp
