// Measures the peaks of a GPU for mma_sync.py: products by mma.sync from registers, and memory reads.
#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int kThreads = 256;

// Each warp cycles over eight accumulator tiles, so that no product waits for the previous one.
__global__ void __launch_bounds__(kThreads) products(float* sink, int rounds) {
  constexpr int kTiles = 8;
  float d[kTiles][4] = {};
  const uint32_t a = threadIdx.x, b = threadIdx.x * 3;
  for (int round = 0; round < rounds; ++round) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %4, %4, %4}, {%5, %5}, {%0, %1, "
          "%2, %3};"
          : "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
          : "r"(a), "r"(b));
    }
  }
  float sum = 0.0f;
  for (int i = 0; i < kTiles; ++i) sum += d[i][0] + d[i][1] + d[i][2] + d[i][3];
  if (sum == 1.0f) *sink = sum;  // never, but the compiler cannot know
}

__global__ void __launch_bounds__(kThreads) reading(const uint4* memory, int64_t count, uint32_t* sink) {
  uint32_t sum = 0;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (; i + 7 * step < count; i += 8 * step) {
    uint4 v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = __ldcs(memory + i + j * step);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum += v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  for (; i < count; i += step) sum += memory[i].x;
  if (sum == 0x12345678) *sink = sum;
}

}  // namespace

// Returns the number of operations that it launches.
extern "C" double start_products(float* sink, int multiprocessors, int rounds, cudaStream_t stream) {
  const int blocks = multiprocessors * 4;
  products<<<blocks, kThreads, 0, stream>>>(sink, rounds);
  return 2.0 * 16 * 8 * 16 * 8 * (kThreads / 32) * static_cast<double>(blocks) * rounds;
}

extern "C" void start_reading(const void* memory, int64_t bytes, void* sink, int multiprocessors, cudaStream_t stream) {
  reading<<<multiprocessors * 8, kThreads, 0, stream>>>(static_cast<const uint4*>(memory), bytes / 16,
                                                        static_cast<uint32_t*>(sink));
}
