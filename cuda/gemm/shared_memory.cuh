#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace fused_mlp {

// Raises the kernel's shared memory limit on the current device, the first time it runs there. Has internal linkage:
// two builds in one process have kernels with the same names, and each needs its own flag.
template <auto kKernel>
static cudaError_t allow_shared_memory(int bytes) {
  static std::atomic<uint64_t> devices_done{0};
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  const uint64_t bit = uint64_t{1} << (device % 64);
  if (device < 64 && (devices_done.load(std::memory_order_acquire) & bit)) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess && device < 64) devices_done.fetch_or(bit, std::memory_order_release);
  return error;
}

}  // namespace fused_mlp
