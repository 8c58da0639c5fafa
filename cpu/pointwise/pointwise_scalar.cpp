// The path for any CPU: vectors of 16 bytes, which every baseline supports or the compiler splits up.

#include "../../torch-ext/operands/activation.h"
#include "pointwise.h"

namespace fused_mlp::scalar {

constexpr int kWidth = 4;

#include "../isa/math.inl"
#include "../isa/memory.inl"
#include "pointwise.inl"

}  // namespace fused_mlp::scalar
