#include "gemm.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <limits>

#include "../../torch-ext/activation.h"
#include "tuning.h"

namespace fused_mlp::sm90 {

template <typename Element>
cudaError_t launch(const GemmProblem& problem, const GemmPlan& plan, int multiprocessors, cudaStream_t stream);

namespace {

bool aligned(const void* pointer, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int64_t kMaxStreamedRows = 64;

// The number of parts of k that costs least, in blocks of k: a CTA reads its blocks one after the other, more slowly
// once the CTAs outnumber what saturates the memory, and every part more has to be added up.
GemmPlan streamed_plan(const GemmProblem& p, int multiprocessors) {
  const int block_n = p.m <= 8 ? 8 : p.m <= 16 ? 16 : p.m <= 32 ? 32 : 64;
  const int64_t tiles = ceil_div(p.n, 64);
  const int64_t k_blocks = ceil_div(p.k, p.gated() ? 64 : 128);
  const auto cost = [&](int split_k) {
    const double crowding = std::max(1.0, tiles * split_k / (kSaturating * multiprocessors));
    return ceil_div(k_blocks, split_k) * crowding + kReduction * (split_k - 1);
  };
  int best = 1;
  for (int split_k = 2; split_k <= 8 && split_k <= k_blocks; split_k *= 2) {
    if (cost(split_k) < cost(best)) best = split_k;
  }
  return {GemmPlan::Kernel::kStreamed, block_n, false, 1, best, "few rows: the weights stream once"};
}

const char* reason(const TiledTime& kernel) {
  if (kernel.ping_pong) return "epilogues hidden behind the other warpgroup's products";
  if (kernel.split_k > 1) return "few tiles: k is split";
  if (kernel.multicast == 1) return "few tiles: small ones";
  return kernel.block_n == 256 ? "large tiles: least traffic" : "tiles that fill whole rounds";
}

double estimated_microseconds(const GemmProblem& p, const TiledTime& c, int multiprocessors) {
  const int cluster = c.multicast * c.split_k;
  // Groups of multiprocessors do not divide evenly into larger clusters.
  const int resident = cluster <= 2 ? multiprocessors / cluster : multiprocessors * 10 / 11 / cluster;
  const int64_t tiles = ceil_div(p.m, 128 * c.multicast) * ceil_div(p.n, p.gated() ? c.block_n / 2 : c.block_n);
  const int64_t rounds = ceil_div(tiles, std::max(resident, 1));
  double round = c.round + c.k_block * ceil_div(ceil_div(p.k, 64), c.split_k);
  if (!p.gated() && p.activation != static_cast<int64_t>(Activation::kLinear)) round += c.activation;
  const double bytes = 2.0 * (static_cast<double>(p.m) * (p.k + p.n) + (p.gated() ? 2.0 : 1.0) * p.n * p.k);
  return std::max(c.start + rounds * round, bytes / kBytesPerMicrosecond);
}

template <size_t kCount>
GemmPlan tiled_plan(const GemmProblem& p, const TiledTime (&choices)[kCount], int multiprocessors) {
  const TiledTime* best = nullptr;
  double best_time = 0;
  for (const TiledTime& choice : choices) {
    if (choice.split_k > 1 && p.k < 64 * choice.split_k) continue;  // every CTA needs a part of k
    const double time = estimated_microseconds(p, choice, multiprocessors);
    if (best != nullptr && time >= best_time) continue;
    best = &choice;
    best_time = time;
  }
  return {GemmPlan::Kernel::kTiled, best->block_n, best->ping_pong, best->multicast, best->split_k, reason(*best)};
}

}  // namespace

const char* refusal(const GemmProblem& p) {
  constexpr int64_t kMaxExtent = std::numeric_limits<int32_t>::max() - 1024;  // coordinates of tiles are 32-bit
  if (p.dtype == DType::kFloat32) return "float32";
  if (p.m == 0 || p.n == 0 || p.k == 0) return "an empty operand";
  if (p.m > kMaxExtent || p.n > kMaxExtent || p.k > kMaxExtent) return "a dimension of 2^31 or more";
  if (p.n % 8 != 0 || p.k % 8 != 0) return "features not a multiple of 8";
  const auto addressable = [](const Matrix& matrix, int64_t cols) {
    return aligned(matrix.data, 16) && matrix.row_stride % 8 == 0 && matrix.row_stride >= cols;
  };
  if (!addressable(p.a, p.k) || !addressable(p.weight, p.k) || (p.gated() && !addressable(p.up_weight, p.k)) ||
      !addressable(p.out, p.n)) {
    return "rows that overlap or are not aligned to 16 bytes";
  }
  if (!aligned(p.bias, 4) || !aligned(p.up_bias, 4)) return "a bias not aligned to 4 bytes";
  return nullptr;
}

const char* slower_than_torch(const GemmProblem& p) {
  if (p.gated()) return nullptr;
  const bool linear = p.activation == static_cast<int64_t>(Activation::kLinear);
  const TorchRows& rows = linear ? kTorchPlain : kTorchActivated;
  return p.m >= rows.first && p.m <= rows.last ? rows.reason : nullptr;
}

GemmPlan plan(const GemmProblem& p, int multiprocessors) {
  if (p.m <= kMaxStreamedRows) return streamed_plan(p, multiprocessors);
  return p.gated() ? tiled_plan(p, kGatedTimes, multiprocessors) : tiled_plan(p, kPlainTimes, multiprocessors);
}

cudaError_t gemm(const GemmProblem& problem, const GemmPlan& plan, int multiprocessors, cudaStream_t stream) {
  return problem.dtype == DType::kFloat16 ? launch<__half>(problem, plan, multiprocessors, stream)
                                          : launch<__nv_bfloat16>(problem, plan, multiprocessors, stream);
}

}  // namespace fused_mlp::sm90
