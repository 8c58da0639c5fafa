#pragma once

#include <torch/csrc/stable/tensor.h>

#include "few_rows.h"

namespace fused_mlp::few_rows {

// The kernels of the best instruction set that this CPU has, or null.
const Kernels* kernels();

// Whether they are faster than the other ways, by measurement, for so many rows and bytes of weights.
bool pays(DType dtype, int64_t rows, int64_t weight_bytes);

// Computes the hidden layer, and, if given, the next one for rows of x. `out` is dense.
void run(Matrix x, int64_t rows, const Layer& hidden, const Layer* down, const torch::stable::Tensor& out,
         Kept kept = {kNoMatrix, kNoMatrix});

}  // namespace fused_mlp::few_rows
