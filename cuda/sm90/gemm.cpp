#include "gemm.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "tuning.h"

namespace fused_mlp::sm90 {

template <typename Element>
cudaError_t launch(const GemmProblem& problem, const GemmPlan& plan, int multiprocessors, cudaStream_t stream);

namespace {

bool aligned(const void* pointer, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int64_t kStreamedRows = 256;  // up to here
constexpr int64_t kStreamedTiles = 4;   // of rows, at most: the weights are read once for each
constexpr int kStreamedColumns = 64;    // of a tile

// The CPU's time that a call of torch's GEMM takes more than a launch of ours. A product of ours that the GPU finishes
// within it is never waited for.
constexpr double kTorchCpuMicroseconds = 12.0;

// What a streamed product behind a GEMM of ours hides of its start, and torch's does not.
constexpr double kEarlyMicroseconds = 3.0;

double microseconds_of_bytes(const GemmProblem& p) {
  const double bytes = 2.0 * (static_cast<double>(p.m) * (p.k + p.n) + (p.gated() ? 2.0 : 1.0) * p.n * p.k);
  return bytes / kBytesPerMicrosecond;
}

// What the bytes and the arithmetic take at least.
double microseconds_at_least(const GemmProblem& p) {
  const double flops = 2.0 * (p.gated() ? 2.0 : 1.0) * p.m * p.n * p.k;
  return std::max(microseconds_of_bytes(p), flops / kFlopsPerMicrosecond);
}

// What the bytes take at least, and a little of the rest, which tells kernels apart where that decides.
double bounded(double time, double floor) {
  constexpr double kTie = 0.1;
  return std::max(time, floor) + kTie * std::min(time, std::max(floor, 0.0));
}

// As tools/tuning/fit.py has them.
double estimated_microseconds(const GemmProblem& p, const TiledTime& c, int multiprocessors) {
  const int resident = std::max(1, usable_multiprocessors(multiprocessors, c.split_k) / c.split_k);
  const int columns = p.gated() ? c.block_n / 2 : c.block_n;
  const int64_t tiles = ceil_div(p.m, c.block_m) * ceil_div(p.n, columns);
  const int64_t rounds = ceil_div(tiles, resident);
  double round = c.round + c.k_block * ceil_div(ceil_div(p.k, 64), c.split_k);
  if (!p.gated() && !p.linear()) round += c.activation;
  const double floor = microseconds_of_bytes(p);
  const double floor_of_full = floor * resident / tiles;
  return (rounds - 1) * bounded(round, floor_of_full) + bounded(c.start + round, floor - (rounds - 1) * floor_of_full);
}

double estimated_microseconds(const GemmProblem& p, const StreamedTime& c, int rows, int split_k, int multiprocessors) {
  const double ctas = static_cast<double>(ceil_div(p.m, rows) * ceil_div(p.n, kStreamedColumns) * split_k);
  const double load = std::max(1.0, ctas / (c.saturating * multiprocessors));
  const int usable = usable_multiprocessors(multiprocessors, split_k);
  const double rounds = std::ceil(ctas / usable);
  const double block = (c.k_block + c.k_row * rows) * load + (c.round_k_block + c.round_k_row * rows) * rounds;
  const double split = c.split_2 * (split_k >= 2) + c.split_4 * (split_k >= 4) + c.split_8 * (split_k >= 8);
  const double time = c.start + split * load + ceil_div(ceil_div(p.k, 64), split_k) * block;
  const double capacity = static_cast<double>(usable) * streamed_ctas(rows);
  const double idle = ctas > capacity ? std::ceil(ctas / capacity) * capacity / ctas - 1.0 : 0.0;
  return bounded(time, microseconds_of_bytes(p) * (1.0 + c.tail * idle));
}

// The plan that takes the least time of those it is shown.
class Fastest {
 public:
  void consider(const GemmPlan& plan) {
    if (best_.reason == nullptr || plan.microseconds < best_.microseconds) best_ = plan;
  }
  const GemmPlan& plan() const { return best_; }

 private:
  GemmPlan best_{};
};

void consider_streamed(const GemmProblem& p, int multiprocessors, Fastest* fastest) {
  const StreamedTime& time = p.gated() ? kStreamedGated : p.linear() ? kStreamedPlain : kStreamedActivated;
  for (const int rows : {8, 16, 32, 48, 64, 80, 128}) {
    if (rows > 64 && p.gated()) break;
    const int64_t tiles = ceil_div(p.m, rows);
    if (tiles > kStreamedTiles) continue;
    for (int split_k = 1; split_k <= 8 && 64 * (split_k - 1) < p.k; split_k *= 2) {
      const char* reason = split_k > 1 ? "few rows and tiles: the weights stream, k is split"
                           : tiles > 1 ? "few rows: the weights stream through small tiles"
                                       : "few rows: the weights stream once";
      const double microseconds = estimated_microseconds(p, time, rows, split_k, multiprocessors);
      fastest->consider({GemmPlan::Kernel::kStreamed, rows, kStreamedColumns, false, split_k, microseconds, reason});
    }
    if (tiles == 1) break;  // larger ones compute more of nothing
  }
}

template <size_t kCount>
void consider_tiled(const GemmProblem& p, const TiledTime (&kernels)[kCount], int multiprocessors, Fastest* fastest) {
  for (const TiledTime& kernel : kernels) {
    if (kernel.split_k > 1 && p.k < 64 * kernel.split_k) continue;  // every CTA needs a part of k
    const bool small = kernel.block_m == 128 && kernel.block_n == 128;
    const char* reason = kernel.ping_pong     ? "epilogues hidden behind the other warpgroup's products"
                         : kernel.split_k > 1 ? "few tiles: k is split"
                         : small              ? "few tiles: small ones"
                                              : "tiles of a size that fills the chip best";
    const double microseconds = estimated_microseconds(p, kernel, multiprocessors);
    fastest->consider({GemmPlan::Kernel::kTiled, kernel.block_m, kernel.block_n, kernel.ping_pong, kernel.split_k,
                       microseconds, reason});
  }
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
  Fastest fastest;
  if (p.m <= kStreamedRows) consider_streamed(p, multiprocessors, &fastest);
  if (p.m >= kTiledRows && p.gated()) consider_tiled(p, kTiledGated, multiprocessors, &fastest);
  if (p.m >= kTiledRows && !p.gated()) consider_tiled(p, kTiledPlain, multiprocessors, &fastest);
  return fastest.plan();
}

const char* choose(const GemmProblem& p, int multiprocessors, GemmPlan* chosen) {
  const TorchRows& rows = p.linear() ? kTorchPlain : kTorchActivated;
  const bool torch_is_faster = !p.gated() && p.m >= rows.first && p.m <= rows.last;  // on the GPU, mostly
  // For a plain product alone only the GPU's time counts; behind a fused GEMM, that one has saved more than a few rows
  // cost.
  const bool cpu_counts = !p.linear() || (p.follows_gemm && p.m <= kStreamedRows);
  const bool near_floor_counts = p.linear() && p.m <= kNearFloorRows;
  if (torch_is_faster && !cpu_counts && !near_floor_counts) return rows.reason;
  *chosen = plan(p, multiprocessors);
  const bool early = p.follows_gemm && chosen->kernel == GemmPlan::Kernel::kStreamed;
  const double microseconds = chosen->microseconds - (early ? kEarlyMicroseconds : 0.0);
  const bool ours = !torch_is_faster || (cpu_counts && chosen->microseconds <= kTorchCpuMicroseconds) ||
                    (near_floor_counts && microseconds <= kNearFloor * microseconds_at_least(p));
  return ours ? nullptr : rows.reason;
}

cudaError_t gemm(const GemmProblem& problem, const GemmPlan& plan, int multiprocessors, cudaStream_t stream) {
  return problem.dtype == DType::kFloat16 ? launch<__half>(problem, plan, multiprocessors, stream)
                                          : launch<__nv_bfloat16>(problem, plan, multiprocessors, stream);
}

}  // namespace fused_mlp::sm90
