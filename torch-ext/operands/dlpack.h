#pragma once

#include <cstdint>

// The part of DLPack's C interface that reads a Python tensor without taking a reference to it. The layout is that of
// version 1 of the standard (dmlc.github.io/dlpack), which changes only with the major version. Extensions that use
// torch's stable ABI cannot include torch's copy of the header.
namespace fused_mlp::dlpack {

constexpr uint32_t kMajorVersion = 1;
constexpr const char* kCapsuleName = "dlpack_exchange_api";

struct Device {
  int32_t type, index;

  bool operator==(const Device&) const = default;
};

struct DataType {
  uint8_t code, bits;
  uint16_t lanes;

  bool operator==(const DataType&) const = default;
};
constexpr DataType kFloat32{2, 32, 1}, kFloat16{2, 16, 1}, kBFloat16{4, 16, 1}, kUint8{1, 8, 1}, kFp8{10, 8, 1},
    kInt8{0, 8, 1}, kInt32{0, 32, 1};

// Strides count elements.
struct Tensor {
  void* data;
  Device device;
  int32_t dims;
  DataType dtype;
  int64_t *sizes, *strides;
  uint64_t byte_offset;
};

struct ExchangeApi {
  uint32_t major_version, minor_version;
  const ExchangeApi* previous;
  void* unused[3];  // functions that create tensors, or transfer references to them
  // Returns 0; else a Python error is set. The result is valid while the tensor lives and is not resized.
  int (*read)(void* tensor, Tensor* out);
  void* current_stream;
};

}  // namespace fused_mlp::dlpack
