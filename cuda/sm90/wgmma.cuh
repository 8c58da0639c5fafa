// wgmma: a warpgroup multiplies a 64 x 16 tile A by a 16 x N tile B. Both are in shared memory, with a 128-byte
// swizzle, and K-major; or B is N-major, or A is M-major.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "ptx.cuh"

namespace fused_mlp::sm90 {

// The descriptor of a K-major tile at an address: rows of 128 bytes in the TMA's 128-byte swizzle, with groups of eight
// rows 1024 bytes apart. A step of 16 elements along K is 32 bytes.
constexpr int kWgmmaK = 16;
constexpr uint32_t kWgmmaStepBytes = kWgmmaK * 2;
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address) {
  constexpr uint32_t kSwizzle128 = 1u << 30;
  constexpr uint32_t kGroupStride = 1024 >> 4;
  uint64_t descriptor;
  asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"((address & 0x3FFFF) >> 4), "r"(kSwizzle128 | kGroupStride));
  return descriptor;
}

// The descriptor of an N-major or M-major tile of 64 rows of k: 64 columns of n are its rows of 128 bytes, and the next
// 64 columns follow 8192 bytes later. A step of 16 along K is two groups of eight rows.
constexpr uint32_t kTransposedStepBytes = kWgmmaK * 128;
__device__ __forceinline__ uint64_t transposed_wgmma_descriptor(uint32_t address) {
  constexpr uint64_t kColumnsStride = 64 * 128 >> 4;
  return wgmma_descriptor(address) | kColumnsStride << 16;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving uses of an accumulator across the asynchronous instructions that write to it.
template <int kCount>
__device__ __forceinline__ void fence_accumulator(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Wgmma<Element, N, whether B is N-major, whether A is M-major>::multiply: d = A B + (accumulate ? d : 0). Thread t of
// the warpgroup holds in d[4 j + 2 i + c] row 16 (t / 32) + 8 i + (t % 32) / 4, column 8 j + 2 (t % 4) + c.
template <typename Element, int N, bool kTransposed = false, bool kTransposedA = false>
struct Wgmma;

#define WGMMA_REGISTERS_4 "%0, %1, %2, %3"
#define WGMMA_REGISTERS_8 WGMMA_REGISTERS_4 ", %4, %5, %6, %7"
#define WGMMA_REGISTERS_16 WGMMA_REGISTERS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_REGISTERS_24 WGMMA_REGISTERS_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define WGMMA_REGISTERS_28 WGMMA_REGISTERS_24 ", %24, %25, %26, %27"
#define WGMMA_REGISTERS_32 \
  WGMMA_REGISTERS_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_REGISTERS_36 WGMMA_REGISTERS_32 ", %32, %33, %34, %35"
#define WGMMA_REGISTERS_40 WGMMA_REGISTERS_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define WGMMA_REGISTERS_44 WGMMA_REGISTERS_40 ", %40, %41, %42, %43"
#define WGMMA_REGISTERS_48 WGMMA_REGISTERS_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_REGISTERS_52 WGMMA_REGISTERS_48 ", %48, %49, %50, %51"
#define WGMMA_REGISTERS_56 WGMMA_REGISTERS_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define WGMMA_REGISTERS_64                                                           \
  WGMMA_REGISTERS_32                                                                 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_REGISTERS_72 WGMMA_REGISTERS_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define WGMMA_REGISTERS_80 WGMMA_REGISTERS_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define WGMMA_REGISTERS_88 WGMMA_REGISTERS_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define WGMMA_REGISTERS_96                                                           \
  WGMMA_REGISTERS_64                                                                 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_REGISTERS_104 WGMMA_REGISTERS_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define WGMMA_REGISTERS_112 WGMMA_REGISTERS_104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define WGMMA_REGISTERS_128 \
  WGMMA_REGISTERS_112       \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define WGMMA_OUT_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_OUT_8(d, i) WGMMA_OUT_4(d, i), WGMMA_OUT_4(d, i + 4)
#define WGMMA_OUT_16(d, i) WGMMA_OUT_8(d, i), WGMMA_OUT_8(d, i + 8)
#define WGMMA_OUT_24(d, i) WGMMA_OUT_16(d, i), WGMMA_OUT_8(d, i + 16)
#define WGMMA_OUT_28(d, i) WGMMA_OUT_24(d, i), WGMMA_OUT_4(d, i + 24)
#define WGMMA_OUT_32(d, i) WGMMA_OUT_16(d, i), WGMMA_OUT_16(d, i + 16)
#define WGMMA_OUT_36(d, i) WGMMA_OUT_32(d, i), WGMMA_OUT_4(d, i + 32)
#define WGMMA_OUT_40(d, i) WGMMA_OUT_32(d, i), WGMMA_OUT_8(d, i + 32)
#define WGMMA_OUT_44(d, i) WGMMA_OUT_40(d, i), WGMMA_OUT_4(d, i + 40)
#define WGMMA_OUT_48(d, i) WGMMA_OUT_32(d, i), WGMMA_OUT_16(d, i + 32)
#define WGMMA_OUT_52(d, i) WGMMA_OUT_48(d, i), WGMMA_OUT_4(d, i + 48)
#define WGMMA_OUT_56(d, i) WGMMA_OUT_48(d, i), WGMMA_OUT_8(d, i + 48)
#define WGMMA_OUT_64(d, i) WGMMA_OUT_32(d, i), WGMMA_OUT_32(d, i + 32)
#define WGMMA_OUT_72(d, i) WGMMA_OUT_64(d, i), WGMMA_OUT_8(d, i + 64)
#define WGMMA_OUT_80(d, i) WGMMA_OUT_64(d, i), WGMMA_OUT_16(d, i + 64)
#define WGMMA_OUT_88(d, i) WGMMA_OUT_80(d, i), WGMMA_OUT_8(d, i + 80)
#define WGMMA_OUT_96(d, i) WGMMA_OUT_64(d, i), WGMMA_OUT_32(d, i + 64)
#define WGMMA_OUT_104(d, i) WGMMA_OUT_96(d, i), WGMMA_OUT_8(d, i + 96)
#define WGMMA_OUT_112(d, i) WGMMA_OUT_104(d, i), WGMMA_OUT_8(d, i + 104)
#define WGMMA_OUT_128(d, i) WGMMA_OUT_112(d, i), WGMMA_OUT_16(d, i + 112)

// A thread has R = N / 2 accumulators. A, B and P are the numbers of the asm operands that follow these; T is 1 if B is
// N-major, S if A is M-major.
#define WGMMA_DEFINE(ELEMENT, TYPE, N, R, A, B, P, T, S)                                                      \
  template <>                                                                                                 \
  struct Wgmma<ELEMENT, N, T, S> {                                                                            \
    static __device__ __forceinline__ void multiply(float (&d)[R], uint64_t a, uint64_t b, bool accumulate) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P                                                    \
                   ", 0;\n"                                                                                   \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" WGMMA_REGISTERS_##R   \
                   "}, %" #A ", %" #B ", p, 1, 1, " #S ", " #T ";\n}"                                         \
                   : WGMMA_OUT_##R(d, 0)                                                                      \
                   : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                                      \
    }                                                                                                         \
  };
#define WGMMA_DEFINE_BOTH(N, R, A, B, P)                   \
  WGMMA_DEFINE(__nv_bfloat16, "bf16", N, R, A, B, P, 0, 0) \
  WGMMA_DEFINE(__half, "f16", N, R, A, B, P, 0, 0)
#define WGMMA_DEFINE_TRANSPOSED(N, R, A, B, P)             \
  WGMMA_DEFINE(__nv_bfloat16, "bf16", N, R, A, B, P, 1, 0) \
  WGMMA_DEFINE(__half, "f16", N, R, A, B, P, 1, 0)
#define WGMMA_DEFINE_TRANSPOSED_BOTH(N, R, A, B, P)        \
  WGMMA_DEFINE(__nv_bfloat16, "bf16", N, R, A, B, P, 1, 1) \
  WGMMA_DEFINE(__half, "f16", N, R, A, B, P, 1, 1)
#define WGMMA_DEFINE_TRANSPOSED_A(N, R, A, B, P)           \
  WGMMA_DEFINE(__nv_bfloat16, "bf16", N, R, A, B, P, 0, 1) \
  WGMMA_DEFINE(__half, "f16", N, R, A, B, P, 0, 1)

// In e4m3 a step is 32 elements along K, which is equally many bytes. Both operands are K-major.
#define WGMMA_DEFINE_E4M3(N, R, A, B, P)                                                                               \
  template <>                                                                                                          \
  struct Wgmma<__nv_fp8_e4m3, N> {                                                                                     \
    static __device__ __forceinline__ void multiply(float (&d)[R], uint64_t a, uint64_t b, bool accumulate) {          \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P                                                             \
                   ", 0;\n"                                                                                            \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" WGMMA_REGISTERS_##R "}, %" #A ", %" #B \
                                                                                                    ", p, 1, 1;\n}"    \
                   : WGMMA_OUT_##R(d, 0)                                                                               \
                   : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                                               \
    }                                                                                                                  \
  };

// WgmmaOfRegisters<Element, N>::multiply: d += A B, with A 64 x 16 in registers. Those of a thread hold row 16 (t / 32)
// + (t % 32) / 4 and the row 8 after it, first for columns 2 (t % 4) and the next, then for the columns 8 after these.
template <typename Element, int N>
struct WgmmaOfRegisters;

#define WGMMA_DEFINE_OF_REGISTERS(ELEMENT, TYPE, N, R, A0, A1, A2, A3, B)                                   \
  template <>                                                                                               \
  struct WgmmaOfRegisters<ELEMENT, N> {                                                                     \
    static __device__ __forceinline__ void multiply(float (&d)[R], const uint32_t (&a)[4], uint64_t b) {    \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" WGMMA_REGISTERS_##R \
                   "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", 1, 1, 1, 0;"                      \
                   : WGMMA_OUT_##R(d, 0)                                                                    \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                   \
    }                                                                                                       \
  };
#define WGMMA_DEFINE_BOTH_OF_REGISTERS(N, R, A0, A1, A2, A3, B)             \
  WGMMA_DEFINE_OF_REGISTERS(__nv_bfloat16, "bf16", N, R, A0, A1, A2, A3, B) \
  WGMMA_DEFINE_OF_REGISTERS(__half, "f16", N, R, A0, A1, A2, A3, B)

WGMMA_DEFINE_BOTH_OF_REGISTERS(32, 16, 16, 17, 18, 19, 20)
WGMMA_DEFINE_BOTH_OF_REGISTERS(64, 32, 32, 33, 34, 35, 36)
WGMMA_DEFINE_BOTH_OF_REGISTERS(128, 64, 64, 65, 66, 67, 68)
WGMMA_DEFINE_BOTH_OF_REGISTERS(256, 128, 128, 129, 130, 131, 132)
WGMMA_DEFINE_E4M3(128, 64, 64, 65, 66)
WGMMA_DEFINE_BOTH(8, 4, 4, 5, 6)
WGMMA_DEFINE_BOTH(16, 8, 8, 9, 10)
WGMMA_DEFINE_BOTH(32, 16, 16, 17, 18)
WGMMA_DEFINE_BOTH(48, 24, 24, 25, 26)
WGMMA_DEFINE_BOTH(56, 28, 28, 29, 30)
WGMMA_DEFINE_BOTH(64, 32, 32, 33, 34)
WGMMA_DEFINE_BOTH(72, 36, 36, 37, 38)
WGMMA_DEFINE_BOTH(80, 40, 40, 41, 42)
WGMMA_DEFINE_BOTH(88, 44, 44, 45, 46)
WGMMA_DEFINE_BOTH(96, 48, 48, 49, 50)
WGMMA_DEFINE_BOTH(104, 52, 52, 53, 54)
WGMMA_DEFINE_BOTH(112, 56, 56, 57, 58)
WGMMA_DEFINE_BOTH(128, 64, 64, 65, 66)
WGMMA_DEFINE_BOTH(144, 72, 72, 73, 74)
WGMMA_DEFINE_BOTH(160, 80, 80, 81, 82)
WGMMA_DEFINE_BOTH(176, 88, 88, 89, 90)
WGMMA_DEFINE_BOTH(192, 96, 96, 97, 98)
WGMMA_DEFINE_BOTH(208, 104, 104, 105, 106)
WGMMA_DEFINE_BOTH(224, 112, 112, 113, 114)
WGMMA_DEFINE_TRANSPOSED(128, 64, 64, 65, 66)
WGMMA_DEFINE_TRANSPOSED(192, 96, 96, 97, 98)
WGMMA_DEFINE_TRANSPOSED_BOTH(192, 96, 96, 97, 98)
WGMMA_DEFINE_TRANSPOSED_A(8, 4, 4, 5, 6)
WGMMA_DEFINE_TRANSPOSED_A(16, 8, 8, 9, 10)
WGMMA_DEFINE_TRANSPOSED_A(32, 16, 16, 17, 18)
WGMMA_DEFINE_TRANSPOSED_A(64, 32, 32, 33, 34)

#undef WGMMA_DEFINE_E4M3
#undef WGMMA_DEFINE_BOTH_OF_REGISTERS
#undef WGMMA_DEFINE_OF_REGISTERS
#undef WGMMA_DEFINE_TRANSPOSED_A
#undef WGMMA_DEFINE_TRANSPOSED_BOTH
#undef WGMMA_DEFINE_TRANSPOSED
#undef WGMMA_DEFINE_BOTH
#undef WGMMA_DEFINE
#undef WGMMA_OUT_4
#undef WGMMA_REGISTERS_4
#undef WGMMA_OUT_8
#undef WGMMA_REGISTERS_8
#undef WGMMA_OUT_16
#undef WGMMA_REGISTERS_16
#undef WGMMA_OUT_24
#undef WGMMA_REGISTERS_24
#undef WGMMA_OUT_28
#undef WGMMA_REGISTERS_28
#undef WGMMA_OUT_32
#undef WGMMA_REGISTERS_32
#undef WGMMA_OUT_36
#undef WGMMA_REGISTERS_36
#undef WGMMA_OUT_40
#undef WGMMA_REGISTERS_40
#undef WGMMA_OUT_44
#undef WGMMA_REGISTERS_44
#undef WGMMA_OUT_48
#undef WGMMA_REGISTERS_48
#undef WGMMA_OUT_52
#undef WGMMA_REGISTERS_52
#undef WGMMA_OUT_56
#undef WGMMA_REGISTERS_56
#undef WGMMA_OUT_64
#undef WGMMA_REGISTERS_64
#undef WGMMA_OUT_72
#undef WGMMA_REGISTERS_72
#undef WGMMA_OUT_80
#undef WGMMA_REGISTERS_80
#undef WGMMA_OUT_88
#undef WGMMA_REGISTERS_88
#undef WGMMA_OUT_96
#undef WGMMA_REGISTERS_96
#undef WGMMA_OUT_104
#undef WGMMA_REGISTERS_104
#undef WGMMA_OUT_112
#undef WGMMA_OUT_128
#undef WGMMA_REGISTERS_112
#undef WGMMA_REGISTERS_128

}  // namespace fused_mlp::sm90
