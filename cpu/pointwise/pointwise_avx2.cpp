#include "../../torch-ext/operands/activation.h"
#include "pointwise.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif

namespace fused_mlp::avx2 {

constexpr int kWidth = 8;

#include "../isa/math.inl"
#include "../isa/memory.inl"
#include "pointwise.inl"

}  // namespace fused_mlp::avx2

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
