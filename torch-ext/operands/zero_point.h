#pragma once

#include <cstdint>

namespace fused_mlp {

constexpr uint32_t kZeroBits = 31;  // the last bits of a scale of int4: the zero point of its block

}  // namespace fused_mlp
