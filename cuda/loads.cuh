// Loads from global memory with hints about how long to cache the data.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fused_mlp {

// A hint to the L2 cache about the data of a load. A load without a policy is faster than one that requests the default
// policy.
__device__ __forceinline__ uint64_t first_to_leave_l2() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Reads what another kernel may have written since this one started: bypasses the L1 cache, and is ordered after
// earlier accesses.
__device__ __forceinline__ int load_fresh(const int* pointer) {
  int value;
  asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(value) : "l"(pointer) : "memory");
  return value;
}

__device__ __forceinline__ int4 load_fresh(const int4* pointer) {
  int4 v;
  asm volatile("ld.global.cg.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(pointer)
               : "memory");
  return v;
}

// Reads 16 bytes that are not read again: they do not stay in L1.
__device__ __forceinline__ uint4 load_once(const void* pointer, uint64_t policy) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(pointer), "l"(policy)
               : "memory");
  return v;
}

}  // namespace fused_mlp
