#include "../../torch-ext/operands/activation.h"
#include "pointwise.h"

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

#include "../isa/math.inl"
#include "../isa/memory.inl"
#include "pointwise.inl"

}  // namespace fused_mlp::avx512

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
