// Programmatic dependent launch: how a kernel overlaps with those before and behind it in the stream. Compiled for
// compute capability 9.0 and later; elsewhere these do nothing, and no kernel is launched so.
#pragma once

namespace fused_mlp {

// Returns when the kernel before is done, and what it has written can be read.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the kernel behind start, once all CTAs of this one have come here or ended.
__device__ __forceinline__ void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace fused_mlp
