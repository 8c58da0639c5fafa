#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../../torch-ext/operands/matrix.h"

namespace fused_mlp {

// A dropout mask: bit c % 32 of word c / 32 of a row is set if column c was kept.
struct KeptBits {
  uint32_t* words;
  int64_t words_of_row;
};

constexpr int64_t words_of_mask(int64_t cols) { return (cols + 31) / 32; }

// Packs torch's masks, which hold a byte of 0 or 1 for each of rows * cols adjacent elements.
cudaError_t launch_pack_mask(const uint8_t* kept, int64_t rows, int64_t cols, KeptBits bits, cudaStream_t stream);

// out = scale x if it was kept, else 0; with `adds`, out += that. out may be x.
cudaError_t launch_mask(Matrix x, KeptBits bits, float scale, bool adds, Matrix out, int64_t rows, int64_t cols,
                        DType dtype, cudaStream_t stream);

}  // namespace fused_mlp
