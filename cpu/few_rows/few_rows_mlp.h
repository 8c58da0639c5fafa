#pragma once

#include "few_rows.h"

namespace fused_mlp::few_rows {

// The name of the instruction set of these kernels.
const char* instruction_set(DType dtype);

// True if the kernels may be faster than the alternatives for this many rows, by measurement.
bool may_pay(DType dtype, int64_t rows);

// True if they are faster for these layers; `down` is null if there is only one layer. `keeps`: a backward follows.
bool take(int64_t rows, const Layer& hidden, const Layer* down, bool keeps);

// The same for layers with quantised weights that have at least one block of features.
bool take_codes(DType dtype, int64_t rows);
constexpr int64_t kFeaturesOfCodes = 32;

// Computes the hidden layer, and, if given, the next one for rows of x. `out` is dense.
void run(Matrix x, int64_t rows, const Layer& hidden, const Layer* down, void* out, Kept kept = {kNoMatrix, kNoMatrix});

}  // namespace fused_mlp::few_rows
