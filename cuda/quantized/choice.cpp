#include "choice.h"

#include <algorithm>
#include <limits>

#include "by_rows/rounding.h"

namespace fused_mlp {
namespace {

struct Listed {
  bool gated;
  CodedKernel kernel;
};
constexpr Listed kKernels[] = {
#define FUSED_MLP_CODED(GATED, ...) {GATED, {__VA_ARGS__}},
#include "streamed/kernels.def"
#undef FUSED_MLP_CODED
};

bool aligned(const void* data, int64_t to) { return reinterpret_cast<uintptr_t>(data) % to == 0; }

// True if 16-bit rows consist of whole vectors and share none with another row.
bool fits(const Matrix& rows, int64_t count, int64_t columns) {
  return aligned(rows.data, 16) && (count == 1 || (rows.row_stride % 8 == 0 && rows.row_stride >= columns));
}

Refusal refusal_of_operands(const CodedProblem& p) {
  if (p.dtype == DType::kFloat32) return Refusal::kFloat32;
  if (p.m == 0 || p.n == 0 || p.k == 0) return Refusal::kEmpty;
  if (p.k % kCodedBlock != 0) return Refusal::kOddFeatures;
  constexpr int64_t kMost = std::numeric_limits<int>::max() / 2;
  if (p.n > kMost || p.k > kMost) return Refusal::kTooLarge;
  const bool tiles = p.coding == Coding::kInt4Tiles;
  const int of_scales = tiles ? 16 : 4;
  const auto aligns = [&](const CodedWeight& weight) {
    return aligned(weight.data, 16) && aligned(weight.scales, of_scales);
  };
  return fits(p.a, p.m, p.k) && aligns(p.weight) && aligns(p.up_weight) ? Refusal::kNone : Refusal::kUnalignedRows;
}

// The time of a product whose tiles are processed in rounds. A round takes the CTA's blocks of k, a start and an end,
// and, if CTAs share k, the addition of their sums.
struct Rounds {
  int64_t slots;  // CTAs that the GPU holds
  double of_block, of_tile, of_split;

  double time(int64_t tiles, int64_t blocks, int split) const {
    // A cluster lies within one GPC, so clusters of 4 and more leave a tenth of the GPU unused.
    const int64_t clusters = (split > 2 ? slots * 10 / 11 : slots) / split;
    const int64_t rounds = ceil_div(tiles, std::max<int64_t>(1, clusters));
    return rounds * (ceil_div(blocks, split) * of_block + of_tile + (split > 1 ? of_split : 0.0));
  }
};

struct Best {
  CodedPlan plan{};
  double time = std::numeric_limits<double>::infinity();

  void offer(const CodedPlan& other, double its_time) {
    if (its_time < time) *this = {other, its_time};
  }
};

// In units of the time of a block; the additional times for a tile and a split are estimates.
CodedPlan choose_streamed(const CodedProblem& p, const CodedKernel& kernel, const Gpu& gpu) {
  const Rounds rounds{int64_t{gpu.multiprocessors} * kernel.ctas, 1.0, 2.0, 2.0};
  const int64_t tiles = ceil_div(p.n, kernel.columns(p.gated())) * ceil_div(p.m, kernel.tokens);
  const int64_t blocks = ceil_div(p.k, kernel.block_k());
  Best best;
  for (int split = 1; split <= (gpu.major < 9 ? 1 : 8) && split <= blocks; ++split) {
    best.offer({CodedLoop::kStreamed, kernel.tokens, 0, split, kernel}, rounds.time(tiles, blocks, split));
  }
  return best.plan;
}

// A tile of a tiled kernel, for both kinds of layer or one, and the time of a block of k if a multiprocessor has this
// many CTAs.
struct Tile {
  int tokens, groups, ctas;
  double of_block;
  bool gated = true, plain = true;
};

// In microseconds, as measured on an H200; for the smallest tile with one or two CTAs per multiprocessor.
constexpr Tile kFourBitTiles[] = {{64, 2, 1, 0.485}, {64, 2, 2, 0.885}, {128, 2, 1, 0.57}, {256, 2, 1, 0.87}};
constexpr Tile kByteTiles[] = {
    {32, 4, 1, 1.17, true, false},
    {64, 4, 1, 1.40, true, false},
    {32, 2, 1, 0.62, false, true},
    {32, 2, 2, 1.20, false, true},
    {64, 2, 1, 0.81, false, true},
    {64, 2, 2, 1.50, false, true},
    {128, 2, 1, 1.05},
};

template <size_t kCount>
CodedPlan choose_tiled(const CodedProblem& p, const Gpu& gpu, const Tile (&tiles)[kCount], int most_split) {
  const int64_t blocks = ceil_div(p.k, tiled_block_k(p.coding));
  Best best;
  for (const Tile& tile : tiles) {
    if (!(p.gated() ? tile.gated : tile.plain)) continue;
    const Rounds rounds{int64_t{gpu.multiprocessors} * tile.ctas, tile.of_block, 3.0, 3.0};
    const int64_t columns = (p.gated() ? 32 : 64) * tile.groups;
    const int64_t count = ceil_div(p.n, columns) * ceil_div(p.m, tile.tokens);
    for (int split = 1; split <= most_split && split <= blocks; ++split) {
      best.offer({CodedLoop::kTiled, tile.tokens, tile.groups, split, {}}, rounds.time(count, blocks, split));
    }
  }
  return best.plan;
}

// Tiled kernels store whole 16-byte vectors, and have one scale per block of k.
bool takes_tiles(const CodedProblem& p, const Gpu& gpu) {
  return p.coding != Coding::kInt4Tiles && gpu.major == 9 && gpu.minor == 0 && p.n % 8 == 0 &&
         p.m > most_streamed_rows(p.coding, p.gated()) && p.m <= most_tiled_rows(p.coding) &&
         kCodedBlock << std::min(p.weight.scale_shift, 16) >= tiled_block_k(p.coding);
}

// Scaled kernels have one scale for a block of 128 x 128, or one per row. They multiply by wgmma, can use rows of a in
// the layout in which the rounding reads them, and read biases in pairs.
bool takes_scaled(const CodedProblem& p, const Gpu& gpu) {
  constexpr int kTile = 128;
  constexpr int64_t kMost = std::numeric_limits<int>::max() / 2;
  if (p.coding != Coding::kFp8 || p.dtype == DType::kFloat32 || gpu.major != 9 || gpu.minor != 0) return false;
  if (p.m <= most_exact_rows(p.n, p.k) || p.n == 0 || p.k == 0 || p.n % 8 != 0 || p.k % 16 != 0) return false;
  if (std::max({p.m, p.n, p.k}) > kMost || !fits(p.a, p.m, p.k)) return false;
  if (!aligned(p.epilogue.bias, 4) || !aligned(p.epilogue.up_bias, 4)) return false;
  const auto takes = [&](const CodedWeight& weight) {
    const bool whole = weight.scale_rows % kTile == 0 || weight.scale_rows >= p.n;
    const bool by_rows = weight.scale_rows == 1 && weight.scale_stride == 1;
    return aligned(weight.data, 16) && aligned(weight.scales, 4) && (whole || by_rows) &&
           kCodedBlock << std::min(weight.scale_shift, 16) >= kTile;
  };
  return takes(p.weight) && (!p.gated() || takes(p.up_weight));
}

// torch's product of many rows, for weights that scaled kernels take too: a scale per row, and results in bfloat16.
bool takes_scaled_mm(const CodedProblem& p) {
  constexpr int kWhole = 16;  // outputs, and bytes
  const bool by_rows = p.weight.scale_rows == 1 && p.weight.scale_stride == 1 && p.n > 1;
  return by_rows && p.dtype == DType::kBFloat16 && p.m > kMostScaledByRows && p.n % kWhole == 0 &&
         p.k <= kMostRoundedColumns && p.n <= kMostRoundedColumns && aligned(p.epilogue.bias, kWhole) &&
         aligned(p.epilogue.up_bias, kWhole);
}

// In microseconds, as measured on an H200: for a block of 128 of k, for a tile, and for adding up parts of k; weights
// arrive at three quarters of the memory's nominal rate. If there are more rows than a tile has, two CTAs with the same
// weights load them together, unless that leaves so many tiles without rows that it takes longer.
CodedPlan choose_scaled(const CodedProblem& p, const Gpu& gpu) {
  constexpr int kTokens = 128, kGroups = 2, kMostSplit = 16;
  constexpr double kBlock = 0.7, kTile = 3.0, kSum = 3.0, kSumOfBytes = 0.65e-6, kOfMemory = 0.75, kAlone = 1.03;
  const int64_t tiles_n = ceil_div(p.n, p.gated() ? 128 : 256), blocks = ceil_div(p.k, 128);
  const double weights = p.n * p.k * (p.gated() ? 2 : 1) / (kOfMemory * gpu.bytes_per_microsecond);
  const bool splits = !p.gated() && p.epilogue.activation == static_cast<int64_t>(Activation::kLinear);
  Best best;
  for (int pair = p.m > kTokens ? 2 : 1; pair > 0; --pair) {
    const int64_t tiles = ceil_div(p.m, kTokens * pair) * tiles_n, slots = gpu.multiprocessors / pair;
    const double of_block = pair < 2 && p.m > kTokens ? kAlone * kBlock : kBlock;
    for (int split = 1; split <= (splits ? kMostSplit : 1) && split <= blocks; ++split) {
      const double rounds = ceil_div(tiles * split, slots), sum_bytes = static_cast<double>(split * p.m * p.n * 4);
      const double product = std::max(rounds * ceil_div(blocks, split) * of_block, weights) + rounds * kTile;
      best.offer({CodedLoop::kScaled, kTokens, kGroups, split, {}, pair},
                 product + (split > 1 ? kSum + kSumOfBytes * sum_bytes : 0.0));
    }
  }
  return best.plan;
}

}  // namespace

Refusal choose_coded(const CodedProblem& p, const Gpu& gpu, CodedPlan* plan) {
  if (gpu.major < 8 || gpu.major == 10 || gpu.major == 11) return Refusal::kGpu;  // build.toml has no code for these
  if (p.coding == Coding::kInt4Tiles && (gpu.major != 9 || p.dtype != DType::kBFloat16)) return Refusal::kGpu;
  if (takes_scaled(p, gpu)) {
    *plan = takes_scaled_mm(p) ? CodedPlan{CodedLoop::kScaledMm} : choose_scaled(p, gpu);
    return Refusal::kNone;
  }
  if (const Refusal refusal = refusal_of_operands(p); refusal != Refusal::kNone) return refusal;
  if (takes_tiles(p, gpu)) {
    *plan = in_bytes(p.coding) ? choose_tiled(p, gpu, kByteTiles, 6) : choose_tiled(p, gpu, kFourBitTiles, 4);
    return Refusal::kNone;
  }
  if (p.m > most_tokens(p.coding)) return Refusal::kTorchIsFaster;
  const CodedKernel* chosen = nullptr;
  for (const auto& [gated, kernel] : kKernels) {
    if (kernel.coding != p.coding || gated != p.gated() || kernel.shared_bytes() > gpu.shared_of_cta) continue;
    chosen = &kernel;
    if (kernel.tokens >= p.m) break;
  }
  if (chosen == nullptr) return Refusal::kGpu;
  *plan = choose_streamed(p, *chosen, gpu);
  return Refusal::kNone;
}

cudaError_t launch_coded(const CodedProblem& p, const CodedPlan& plan, const Gpu& gpu, cudaStream_t stream) {
  if (plan.loop == CodedLoop::kTiled) return launch_coded_tiled(p, plan, gpu, stream);
  return p.dtype == DType::kFloat16 ? launch_coded_fp16(p, plan, gpu, stream) : launch_coded_bf16(p, plan, gpu, stream);
}

}  // namespace fused_mlp
