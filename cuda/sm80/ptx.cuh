// The instructions that the GEMMs of sm_80 use: cp.async, ldmatrix, mma.sync, and shared memory by address. All PTX of
// this folder is in this file.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace fused_mlp::sm80 {

// Shared memory is addressed by 32-bit addresses throughout.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Hides the origin of a pointer from the compiler, so that it stays in a register instead of being recomputed in a
// loop.
template <typename T>
__device__ __forceinline__ void keep(const T*& pointer) {
  asm volatile("" : "+l"(pointer));
}

__device__ __forceinline__ void cta_sync() { __syncthreads(); }
__device__ __forceinline__ void warp_sync() { __syncwarp(); }

// ---- Copies from global to shared memory that nobody waits for until they are needed --------------------------------

// Copies 16 bytes, or writes zeros without reading the source if they are not present.
__device__ __forceinline__ void cp_async_16(uint32_t shared, const void* global, bool present) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(present ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void cp_async_4(uint32_t shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global) : "memory");
}

// Commits this thread's copies since the last commit as a group, which may be empty.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `kPending` of this thread's latest groups are in flight. Other threads see what has arrived after
// a barrier.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- Shared memory --------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t load_shared(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ uint4 load_shared_uint4(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ float4 load_shared_float4(uint32_t address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ void store_shared(uint32_t address, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

__device__ __forceinline__ void store_shared_float(uint32_t address, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}

__device__ __forceinline__ void store_shared_float2(uint32_t address, float2 v) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(v.x), "f"(v.y) : "memory");
}

// ---- Tensor cores ---------------------------------------------------------------------------------------------------

// Four 8 x 8 matrices of 16-bit elements. Lane 8 i + r provides the address of row r of matrix i. Afterwards each lane
// has elements 2 (lane % 4) and the next of row lane / 4 of every matrix.
__device__ __forceinline__ void load_matrix_x4(uint32_t address, uint32_t& r0, uint32_t& r1, uint32_t& r2,
                                               uint32_t& r3) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3)
               : "r"(address)
               : "memory");
}

// The same, with the matrices transposed.
__device__ __forceinline__ void load_matrix_x4_transposed(uint32_t address, uint32_t& r0, uint32_t& r1, uint32_t& r2,
                                                          uint32_t& r3) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3)
               : "r"(address)
               : "memory");
}

// Two matrices, at the addresses of lanes 0 to 15.
__device__ __forceinline__ void load_matrix_x2(uint32_t address, uint32_t& r0, uint32_t& r1) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r0), "=r"(r1)
               : "r"(address)
               : "memory");
}

// Transposes an 8 x 8 matrix of 16-bit elements, of which each lane has two of a row in ldmatrix's layout.
__device__ __forceinline__ uint32_t transposed(uint32_t row) {
  uint32_t column;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(column) : "r"(row));
  return column;
}

// d += A B^T, A 16 x 16 and B 8 x 16. A lane has in d[2 i + c] row 8 i + lane / 4, column 2 (lane % 4) + c.
template <typename Element>
struct Mma;

#define FUSED_MLP_MMA(ELEMENT, TYPE)                                                                                 \
  template <>                                                                                                        \
  struct Mma<ELEMENT> {                                                                                              \
    static __device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) { \
      asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE                                            \
                   ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                            \
                   : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                  \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                              \
    }                                                                                                                \
    /* d = A B^T: nothing has to be cleared before. */                                                               \
    static __device__ __forceinline__ void set(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {      \
      asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE                                            \
                   ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"                        \
                   : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])                                                  \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.0f));                   \
    }                                                                                                                \
  };
FUSED_MLP_MMA(__nv_bfloat16, "bf16")
FUSED_MLP_MMA(__half, "f16")
#undef FUSED_MLP_MMA

}  // namespace fused_mlp::sm80
