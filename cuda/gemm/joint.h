// Linear layers of one input in one launch, as the projections of an attention are.
#pragma once

#include <cuda_runtime_api.h>

#include <array>

#include "../../torch-ext/operands/matrix.h"
#include "gpu.h"

namespace fused_mlp {

// out [m, n] = a weight^T + bias, of a weight [n, k], and of a bias or none. There is no layer where n is 0. Rows of
// `out` are adjacent.
struct JointLayer {
  Matrix weight;
  const void* bias;
  int64_t n;
  void* out;
};

// Layers of a [m, k]; the first is there.
struct JointLayers {
  Matrix a;
  int64_t m, k;
  DType dtype;
  std::array<JointLayer, 3> layers;
};

struct JointKernels {
  // True if one launch takes less time than torch's products. Outputs may be missing yet, and begin at 16 bytes then.
  bool (*takes)(const JointLayers& product, const Gpu& gpu);
  cudaError_t (*launch)(const JointLayers& product, const Gpu& gpu, cudaStream_t stream);
};

}  // namespace fused_mlp
