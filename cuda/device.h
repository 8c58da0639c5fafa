// The ops' view of torch and of the CUDA runtime: the stream, the GPU, the memory of a tensor.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstring>
#include <optional>
#include <vector>

#include "../torch-ext/operands/matrix.h"
#include "../torch-ext/operands/tensor_rows.h"
#include "../torch-ext/torch_binding.h"
#include "gemm/gpu.h"

// torch's headers declare these functions only if USE_CUDA is defined.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);
extern "C" AOTITorchError aoti_torch_cuda_caching_allocator_raw_alloc(uint64_t nbytes, void** ret_ptr);
extern "C" AOTITorchError aoti_torch_cuda_caching_allocator_raw_delete(void* ptr);

namespace fused_mlp {

inline void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // otherwise the check after the next launch would report this error
  STD_TORCH_CHECK(false, "fused_mlp: CUDA error: ", cudaGetErrorString(error));
}

inline cudaStream_t current_stream(int32_t device) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<cudaStream_t>(stream);
}
inline cudaStream_t current_stream(const Tensor& tensor) { return current_stream(tensor.get_device_index()); }

inline bool is_captured(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) == cudaSuccess) return status != cudaStreamCaptureStatusNone;
  cudaGetLastError();  // the default stream, while another one is captured
  return true;
}

inline DType dtype_of(const Tensor& tensor, const char* name) {
  switch (tensor.scalar_type()) {
    case torch::headeronly::ScalarType::Float:
      return DType::kFloat32;
    case torch::headeronly::ScalarType::Half:
      return DType::kFloat16;
    case torch::headeronly::ScalarType::BFloat16:
      return DType::kBFloat16;
    default:
      STD_TORCH_CHECK(false, name, " must be float32, float16 or bfloat16");
  }
}

inline Gpu describe_gpu(int device) {
  const auto attribute = [&](cudaDeviceAttr name) {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, name, device));
    return value;
  };
  Gpu gpu{};
  gpu.major = attribute(cudaDevAttrComputeCapabilityMajor);
  gpu.minor = attribute(cudaDevAttrComputeCapabilityMinor);
  gpu.multiprocessors = attribute(cudaDevAttrMultiProcessorCount);
  gpu.shared_of_cta = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  gpu.shared_of_multiprocessor = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  gpu.cycles_per_microsecond = attribute(cudaDevAttrClockRate) / 1e3;  // from kHz
  // Memory transfers data twice per clock cycle.
  gpu.bytes_per_microsecond =
      attribute(cudaDevAttrMemoryClockRate) / 1e3 * 2 * attribute(cudaDevAttrGlobalMemoryBusWidth) / 8;
  gpu.l2_bytes = attribute(cudaDevAttrL2CacheSize);
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, device));
  gpu.geforce = std::strstr(properties.name, "GeForce") != nullptr;
  return gpu;
}

// The driver is queried once: a query takes a noticeable part of a small call, which takes microseconds.
inline const std::vector<Gpu>& gpus() {
  static const std::vector<Gpu> gpus = [] {
    int count = 0;
    check(cudaGetDeviceCount(&count));
    std::vector<Gpu> found(count);
    for (int i = 0; i < count; ++i) found[i] = describe_gpu(i);
    return found;
  }();
  return gpus;
}
inline const Gpu& gpu(int32_t device) { return gpus().at(device); }

// Makes a GPU the current one. If there is only one GPU it is current already, and torch's guard would take as much
// host time as a tensor.
class DeviceGuard {
 public:
  explicit DeviceGuard(int32_t device) {
    if (gpus().size() > 1) guard_.emplace(device);
  }

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};

// Memory of torch's allocator without a tensor around it, which takes the CPU a third of the time. As with a tensor's
// memory, work queued on the stream may still use it after it is freed.
class Scratch {
 public:
  explicit Scratch(int64_t bytes) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_caching_allocator_raw_alloc(bytes, &data_));
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { aoti_torch_cuda_caching_allocator_raw_delete(data_); }
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

}  // namespace fused_mlp
