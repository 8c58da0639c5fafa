#pragma once

#include <cstdint>

namespace fused_mlp::sm90 {

// A place in a ring of shared memory stages, and the parity of the round: that of the mbarrier phase to wait for.
template <int kStages>
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace fused_mlp::sm90
