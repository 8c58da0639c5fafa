// Programmatic dependent launch: how a kernel overlaps with those before and after it in the stream. Compiled for
// compute capability 9.0 and later; elsewhere these functions do nothing, and no kernel is launched this way.
#pragma once

namespace fused_mlp {

// Returns when the previous kernel is done and its writes are visible.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel start once all CTAs of this one have called this or ended.
__device__ __forceinline__ void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace fused_mlp
