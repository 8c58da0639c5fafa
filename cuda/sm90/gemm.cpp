#include "gemm.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <limits>

namespace fused_mlp::sm90 {

template <typename Element>
cudaError_t launch(const GemmProblem& problem, const GemmPlan& plan, int multiprocessors, cudaStream_t stream);

namespace {

bool aligned(const void* pointer, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

int ceil_div(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

}  // namespace

const char* refusal(const GemmProblem& p) {
  constexpr int64_t kMaxExtent = std::numeric_limits<int32_t>::max() - 1024;  // coordinates of tiles are 32-bit
  if (p.dtype == DType::kFloat32) return "float32";
  if (p.m == 0 || p.n == 0 || p.k == 0) return "an empty operand";
  if (p.m > kMaxExtent || p.n > kMaxExtent || p.k > kMaxExtent) return "a dimension of 2^31 or more";
  if (p.n % 8 != 0 || p.k % 8 != 0) return "features not a multiple of 8";
  for (const Matrix& matrix : {p.a, p.weight, p.up_weight, p.out}) {
    if (matrix.data == nullptr) continue;
    if (!aligned(matrix.data, 16) || matrix.row_stride % 8 != 0) return "rows not aligned to 16 bytes";
  }
  if (!aligned(p.bias, 4) || !aligned(p.up_bias, 4)) return "a bias not aligned to 4 bytes";
  return nullptr;
}

GemmPlan plan(const GemmProblem& p, int multiprocessors) {
  if (p.m <= 64) {
    const int tokens = p.m <= 8 ? 8 : p.m <= 16 ? 16 : p.m <= 32 ? 32 : 64;
    const int tiles = ceil_div(p.n, 64);
    const int k_blocks = ceil_div(p.k, p.gated() ? 64 : 128);
    int split_k = 1;
    while (split_k < 8 && tiles * split_k * 2 <= 2 * multiprocessors && split_k * 4 <= k_blocks) split_k *= 2;
    return {GemmPlan::Kernel::kStreamed, tokens, 1, split_k, "few rows"};
  }
  return {GemmPlan::Kernel::kTiled, 256, 2, 1, "many rows"};
}

cudaError_t gemm(const GemmProblem& problem, const GemmPlan& plan, cudaStream_t stream) {
  int device = 0, multiprocessors = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  const cudaError_t error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  return problem.dtype == DType::kFloat16 ? launch<__half>(problem, plan, multiprocessors, stream)
                                          : launch<__nv_bfloat16>(problem, plan, multiprocessors, stream);
}

}  // namespace fused_mlp::sm90
