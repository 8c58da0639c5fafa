#pragma once

#include <cstdint>

namespace fused_mlp {

constexpr uint32_t kZeroBits = 31;  // of a scale of int4, its last: the zero point of its block

}  // namespace fused_mlp
