#pragma once

#include <cstdint>

namespace fused_mlp::sm90 {

// A position in a ring of shared memory stages, and the parity of its round, which is that of the mbarrier phase to
// wait for.
struct RingPosition {
  int stages;
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ explicit RingPosition(int stages, uint32_t parity = 0) : stages(stages), parity(parity) {}
  __device__ __forceinline__ void advance() {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ __forceinline__ void skip(int count) {
    parity ^= (stage + count) / stages & 1;
    stage = (stage + count) % stages;
  }
};

}  // namespace fused_mlp::sm90
