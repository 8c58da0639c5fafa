#include "tensor_map.h"

#include <cuda_runtime_api.h>

#include <memory>

namespace fused_mlp::sm90 {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// The driver's function, found at run time: the extension does not link against libcuda.
Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
  constexpr unsigned kVersion = 12000;  // the first CUDA with tensor maps
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, kVersion, cudaEnableDefault, &result);
  return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
}

// Makes the GPU's context current in this thread, as the driver requires. A thread that has called the runtime has one;
// but the first thing that an autograd thread does may be to launch a kernel of ours.
void make_context_current() {
  int device = 0;
  if (cudaGetDevice(&device) == cudaSuccess) cudaSetDevice(device);
}

// Everything that a map depends on: an encoded map stays valid as long as these are the same.
struct Key {
  const void* data = nullptr;
  int64_t row_stride = 0;
  int64_t rows = 0;
  int64_t cols = 0;
  int box_rows = 0;
  int box_cols = 0;
  DType dtype{};
  int64_t count = 0;  // of matrices in a stack; 0 for a single one
  int64_t stack_rows = 0;

  bool operator==(const Key&) const = default;

  size_t slot(size_t count) const {
    const uint64_t mixed = (reinterpret_cast<uintptr_t>(data) >> 4) * 31 + static_cast<uint64_t>(rows) * 7 + box_rows;
    return mixed * 0x9E3779B97F4A7C15u >> 32 & (count - 1);
  }
};

bool encode(CUtensorMap* map, const Key& key) {
  static const Encode driver_encode = find_encode();
  if (driver_encode == nullptr) return false;
  constexpr int kElementBytes = 2;
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(key.cols), static_cast<cuuint64_t>(key.rows),
                               static_cast<cuuint64_t>(key.count)};
  const cuuint64_t row_bytes = static_cast<cuuint64_t>(key.row_stride) * kElementBytes;
  const cuuint64_t strides[2] = {row_bytes, row_bytes * key.stack_rows};
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(key.box_cols), static_cast<cuuint32_t>(key.box_rows), 1};
  const cuuint32_t element_strides[3] = {1, 1, 1};
  const CUtensorMapSwizzle swizzle = key.box_cols == 64   ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : key.box_cols == 32 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                          : CU_TENSOR_MAP_SWIZZLE_32B;
  const CUtensorMapDataType type =
      key.dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  // If L2 fetches 256 bytes for a request of 128, streamed kernels take 1 to 3% longer, and all kernels up to 20% if
  // rows are not whole lines.
  return driver_encode(map, type, key.count == 0 ? 2 : 3, const_cast<void*>(key.data), sizes, strides, box,
                       element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                       CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

bool encode_or_find(CUtensorMap* map, const Key& key) {
  // The driver takes about a microsecond for a map (H100 host), and a model needs the same few hundred again and again.
  struct Entry {
    Key key;
    CUtensorMap map;
  };
  constexpr size_t kEntries = 512;
  thread_local std::unique_ptr<Entry[]> cache;
  if (cache == nullptr) {
    make_context_current();
    cache = std::make_unique<Entry[]>(kEntries);
  }
  Entry& entry = cache[key.slot(kEntries)];
  if (entry.key != key) {
    entry.key = {};
    if (!encode(&entry.map, key)) return false;
    entry.key = key;
  }
  *map = entry.map;
  return true;
}

}  // namespace

bool encode_tensor_map(CUtensorMap* map, DType dtype, const Matrix& matrix, int64_t rows, int64_t cols, int box_rows,
                       int box_cols) {
  return encode_or_find(map, {matrix.data, matrix.row_stride, rows, cols, box_rows, box_cols, dtype});
}

bool encode_tensor_map(CUtensorMap* map, DType dtype, const MatrixStack& stack, int64_t rows, int64_t cols,
                       int box_rows, int box_cols) {
  return encode_or_find(map, {stack.first.data, stack.first.row_stride, rows, cols, box_rows, box_cols, dtype,
                              stack.count, stack.stack_rows});
}

}  // namespace fused_mlp::sm90
