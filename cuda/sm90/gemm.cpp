#include "gemm.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace fused_mlp::sm90 {

template <typename Element>
cudaError_t launch(const GemmProblem& problem, const GemmPlan& plan, int multiprocessors, cudaStream_t stream);

namespace {

bool aligned(const void* pointer, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

cudaError_t count_multiprocessors(int* count) {
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  return cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
}

cudaError_t launch_for_dtype(const GemmProblem& problem, const GemmPlan& plan, int multiprocessors,
                             cudaStream_t stream) {
  return problem.dtype == DType::kFloat16 ? launch<__half>(problem, plan, multiprocessors, stream)
                                          : launch<__nv_bfloat16>(problem, plan, multiprocessors, stream);
}

constexpr int64_t kMaxStreamedRows = 64;

// Fills the chip once: more parts of k only add reductions.
GemmPlan streamed_plan(const GemmProblem& p, int multiprocessors) {
  const int block_n = p.m <= 8 ? 8 : p.m <= 16 ? 16 : p.m <= 32 ? 32 : 64;
  const int64_t tiles = ceil_div(p.n, 64);
  const int64_t k_blocks = ceil_div(p.k, p.gated() ? 64 : 128);
  int split_k = 1;
  while (split_k < 8 && tiles * split_k * 2 <= multiprocessors && split_k * 2 <= k_blocks) split_k *= 2;
  return {GemmPlan::Kernel::kStreamed, block_n, false, 1, split_k, "few rows: the weights stream once"};
}

struct TiledChoice {
  bool gated, plain;  // which problems it is compiled for
  int block_n;
  bool ping_pong;
  int multicast, split_k;
  const char* reason;
};

constexpr TiledChoice kTiledChoices[] = {
    {true, true, 256, false, 2, 1, "large tiles: least traffic"},
    {true, true, 192, true, 2, 1, "epilogues hidden behind the other warpgroup's products"},
    {true, true, 128, true, 2, 1, "smaller tiles: even waves, epilogues hidden"},
    {true, true, 128, false, 1, 1, "small tiles: few of them"},
    {true, true, 128, false, 1, 2, "k split in two: few tiles"},
    {true, true, 128, false, 2, 2, "k split in two, weights shared: few tiles"},
    {true, false, 224, false, 2, 1, "tiles that fill whole waves"},
    {false, true, 192, false, 2, 1, "tiles that fill whole waves"},
    {false, true, 128, false, 1, 4, "k split in four: few tiles"},
    {false, true, 256, false, 2, 4, "k split in four, weights shared: few tiles"},
};

// A model of a tiled kernel's time, in cycles of one multiprocessor; its constants come from timings on an H100.
double estimated_cycles(const GemmProblem& p, const TiledChoice& c, int multiprocessors) {
  constexpr double kLaunch = 4000;            // start, first loads, last stores
  constexpr double kL2BytesPerCycle = 36;     // from L2 to one multiprocessor
  constexpr double kDramBytesPerCycle = 1650;  // to the whole chip
  constexpr double kReduction = 1500;         // of sums across a cluster, a CTA
  const int parts = p.gated() ? 2 : 1;
  const int tile_n = c.block_n / parts;
  const double tiles = static_cast<double>(ceil_div(p.m, 128 * c.multicast) * ceil_div(p.n, tile_n));
  const double rounds = std::ceil(tiles / (multiprocessors / (c.multicast * c.split_k)));
  const double k_blocks = static_cast<double>(ceil_div(ceil_div(p.k, 64), c.split_k));
  const double products = 4.0 * c.block_n;                                  // of a k block of 64, at the peak rate
  const double traffic = (128 * 128 + c.block_n * 128.0 / c.multicast) / kL2BytesPerCycle;
  const double main_loop = k_blocks * std::max(products, traffic);
  const double epilogue = (p.gated() ? 30.0 : 20.0) * tile_n / c.split_k * (c.ping_pong ? 1.5 : 1.0);
  const double tile = c.ping_pong ? std::max(main_loop, (main_loop + epilogue) / 2) : main_loop + epilogue;
  double cycles = rounds * tile + (c.ping_pong ? epilogue : 0);
  if (c.split_k > 1) cycles += kReduction * c.split_k;
  const double bytes = 2.0 * (static_cast<double>(p.m) * p.k + static_cast<double>(parts) * p.n * p.k +
                              static_cast<double>(p.m) * p.n);
  return kLaunch + std::max(cycles, bytes / kDramBytesPerCycle);
}

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
  if (p.m <= kMaxStreamedRows) return streamed_plan(p, multiprocessors);
  GemmPlan best{};
  double best_cycles = std::numeric_limits<double>::infinity();
  for (const TiledChoice& choice : kTiledChoices) {
    if (p.gated() ? !choice.gated : !choice.plain) continue;
    if (p.k < 64 * choice.split_k) continue;
    const double cycles = estimated_cycles(p, choice, multiprocessors);
    if (cycles >= best_cycles) continue;
    best_cycles = cycles;
    best = {GemmPlan::Kernel::kTiled, choice.block_n, choice.ping_pong, choice.multicast, choice.split_k, choice.reason};
  }
  return best;
}

cudaError_t gemm(const GemmProblem& problem, cudaStream_t stream) {
  int multiprocessors = 0;
  if (const cudaError_t error = count_multiprocessors(&multiprocessors); error != cudaSuccess) return error;
  return launch_for_dtype(problem, plan(problem, multiprocessors), multiprocessors, stream);
}

cudaError_t gemm(const GemmProblem& problem, const GemmPlan& plan, cudaStream_t stream) {
  int multiprocessors = 0;
  if (const cudaError_t error = count_multiprocessors(&multiprocessors); error != cudaSuccess) return error;
  return launch_for_dtype(problem, plan, multiprocessors, stream);
}

}  // namespace fused_mlp::sm90
