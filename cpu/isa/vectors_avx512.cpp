// The kernels of few_rows.h and of matmul.h in AVX-512.
#include "../../torch-ext/operands/activation.h"
#include "../../torch-ext/operands/zero_point.h"
#include "../few_rows/few_rows.h"
#include "../few_rows/matmul.h"

#if defined(__x86_64__)

#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma")
#endif

namespace fused_mlp::avx512 {

constexpr int kWidth = 16;
#define FUSED_MLP_PERMUTES

// clang-format off: each needs those before it
#include "math.inl"
#include "memory.inl"
#include "lanes_avx512.inl"
#include "../quantized/lanes_avx512.inl"
#include "../quantized/decode.inl"
#include "../few_rows/few_rows.inl"
#include "../few_rows/matmul.inl"
// clang-format on

}  // namespace fused_mlp::avx512

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
