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
constexpr int64_t kMaxWideRows = 256;  // of the streamed kernel with tiles of 128 rows

// The CPU's time that a call of torch's GEMM takes more than a launch of ours. A product of ours that the GPU finishes
// within it is never waited for.
constexpr double kTorchCpuMicroseconds = 12.0;

double microseconds_of_bytes(const GemmProblem& p) {
  const double bytes = 2.0 * (static_cast<double>(p.m) * (p.k + p.n) + (p.gated() ? 2.0 : 1.0) * p.n * p.k);
  return bytes / kBytesPerMicrosecond;
}

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
  constexpr double kStart = 4.0;  // a launch and its latencies, as in the smallest products measured
  const double microseconds = kStart + microseconds_of_bytes(p);
  return {GemmPlan::Kernel::kStreamed, block_n, false, 1, best, microseconds, "few rows: the weights stream once"};
}

const char* reason(const KernelTime& kernel) {
  if (kernel.streamed) return "few rows and tiles: the weights stream, k is split";
  if (kernel.ping_pong) return "epilogues hidden behind the other warpgroup's products";
  if (kernel.split_k > 1) return "few tiles: k is split";
  if (kernel.multicast == 1) return "few tiles: small ones";
  return kernel.block_n == 256 ? "large tiles: least traffic" : "tiles that fill whole rounds";
}

double estimated_microseconds(const GemmProblem& p, const KernelTime& c, int multiprocessors) {
  const int cluster = c.multicast * c.split_k;
  // Groups of multiprocessors do not divide evenly into larger clusters.
  const int resident = cluster <= 2 ? multiprocessors / cluster : multiprocessors * 10 / 11 / cluster;
  const int columns = c.streamed ? 64 : p.gated() ? c.block_n / 2 : c.block_n;
  const int64_t tiles = ceil_div(p.m, 128 * c.multicast) * ceil_div(p.n, columns);
  const int64_t rounds = ceil_div(tiles, std::max(resident, 1));
  double round = c.round + c.k_block * ceil_div(ceil_div(p.k, 64), c.split_k);
  if (!p.gated() && p.activation != static_cast<int64_t>(Activation::kLinear)) round += c.activation;
  return std::max(c.start + rounds * round, microseconds_of_bytes(p));
}

template <size_t kCount>
GemmPlan timed_plan(const GemmProblem& p, const KernelTime (&kernels)[kCount], int multiprocessors) {
  const KernelTime* best = nullptr;
  double best_time = 0;
  for (const KernelTime& kernel : kernels) {
    if (kernel.split_k > 1 && p.k < 64 * kernel.split_k) continue;  // every CTA needs a part of k
    if (kernel.streamed && p.m > kMaxWideRows) continue;
    const double time = estimated_microseconds(p, kernel, multiprocessors);
    if (best != nullptr && time >= best_time) continue;
    best = &kernel;
    best_time = time;
  }
  const auto kind = best->streamed ? GemmPlan::Kernel::kStreamed : GemmPlan::Kernel::kTiled;
  return {kind, best->block_n, best->ping_pong, best->multicast, best->split_k, best_time, reason(*best)};
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

GemmPlan plan(const GemmProblem& p, int multiprocessors) {
  if (p.m <= kMaxStreamedRows) return streamed_plan(p, multiprocessors);
  return p.gated() ? timed_plan(p, kGatedTimes, multiprocessors) : timed_plan(p, kPlainTimes, multiprocessors);
}

const char* choose(const GemmProblem& p, int multiprocessors, GemmPlan* chosen) {
  const bool linear = p.activation == static_cast<int64_t>(Activation::kLinear);
  const TorchRows& rows = linear ? kTorchPlain : kTorchActivated;
  const bool torch_is_faster = !p.gated() && p.m >= rows.first && p.m <= rows.last;  // on the GPU
  // A plain product alone is torch's; behind a fused GEMM, that one has saved more than a few rows cost.
  const bool cpu_counts = !linear || (p.follows_gemm && p.m <= kMaxWideRows);
  if (torch_is_faster && !cpu_counts) return rows.reason;
  *chosen = plan(p, multiprocessors);
  return torch_is_faster && chosen->microseconds > kTorchCpuMicroseconds ? rows.reason : nullptr;
}

cudaError_t gemm(const GemmProblem& problem, const GemmPlan& plan, int multiprocessors, cudaStream_t stream) {
  return problem.dtype == DType::kFloat16 ? launch<__half>(problem, plan, multiprocessors, stream)
                                          : launch<__nv_bfloat16>(problem, plan, multiprocessors, stream);
}

}  // namespace fused_mlp::sm90
