#pragma once

#include "few_rows.h"

namespace fused_mlp::few_rows {

// The name of the instruction set of their kernels.
const char* instruction_set(DType dtype);

// True if they may be faster than the other ways, by measurement, for so many rows.
bool may_pay(DType dtype, int64_t rows);

// True if they are for these layers; `down` is null where there is one layer. `keeps`: a backward follows.
bool take(int64_t rows, const Layer& hidden, const Layer* down, bool keeps);

// The same of layers whose weights are quantised and have a block of features at least.
bool take_codes(DType dtype, int64_t rows);
constexpr int64_t kFeaturesOfCodes = 32;

// Computes the hidden layer, and, if given, the next one for rows of x. `out` is dense.
void run(Matrix x, int64_t rows, const Layer& hidden, const Layer* down, void* out, Kept kept = {kNoMatrix, kNoMatrix});

}  // namespace fused_mlp::few_rows
