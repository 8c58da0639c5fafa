#include "choice.h"

#include <algorithm>
#include <limits>

namespace fused_mlp {
namespace {

constexpr CodedKernel kKernels[] = {
#define FUSED_MLP_CODED(...) {__VA_ARGS__},
#include "kernels.def"
#undef FUSED_MLP_CODED
};

bool aligned(const void* data, int64_t to) { return reinterpret_cast<uintptr_t>(data) % to == 0; }

Refusal refusal_of_operands(const CodedProblem& p) {
  if (p.dtype == DType::kFloat32) return Refusal::kFloat32;
  if (p.m == 0 || p.n == 0 || p.k == 0) return Refusal::kEmpty;
  if (p.k % kCodedBlock != 0) return Refusal::kOddFeatures;
  constexpr int64_t kMost = std::numeric_limits<int>::max() / 2;
  if (p.n > kMost || p.k > kMost) return Refusal::kTooLarge;
  const auto fits = [](const CodedWeight& weight) { return aligned(weight.data, 16) && aligned(weight.scales, 4); };
  const bool rows = aligned(p.a.data, 16) && (p.m == 1 || p.a.row_stride % 8 == 0);
  return rows && fits(p.weight) && fits(p.up_weight) ? Refusal::kNone : Refusal::kUnalignedRows;
}

// The time of a product, in units of a block of k of a CTA. Its tiles are done in rounds, each of which has a start and
// an end too; CTAs that share k have their sums to add besides.
struct Rounds {
  int64_t slots;  // CTAs that the chip holds
  double of_tile, of_split;

  double time(int64_t tiles, int64_t blocks, int split, double of_block) const {
    const int64_t rounds = ceil_div(tiles, std::max<int64_t>(1, slots / split));
    return rounds * (ceil_div(blocks, split) * of_block + of_tile + (split > 1 ? of_split : 0.0));
  }
};

CodedPlan choose_streamed(const CodedProblem& p, const CodedKernel& kernel, const Gpu& gpu) {
  CodedPlan best{MainLoop::kStreamed, kernel.tokens, 1, kernel};
  if (gpu.major < 9) return best;
  const Rounds rounds{int64_t{gpu.multiprocessors} * kernel.ctas, 2.0, 2.0};
  const int64_t tiles = ceil_div(p.n, kernel.columns(p.gated())) * ceil_div(p.m, kernel.tokens);
  const int64_t blocks = ceil_div(p.k, kernel.block_k());
  double least = std::numeric_limits<double>::infinity();
  for (int split = 1; split <= 8 && split <= blocks; split *= 2) {
    const double time = rounds.time(tiles, blocks, split, 1.0);
    if (time < least) best.split = split;
    least = std::min(least, time);
  }
  return best;
}

CodedPlan choose_tiled(const CodedProblem& p, const Gpu& gpu) {
  CodedPlan best{MainLoop::kTiled, 256, 1, {}};
  const Rounds rounds{gpu.multiprocessors, 6.0, 4.0};
  const int64_t columns = p.gated() ? 64 : 128, blocks = p.k / kCodedBlock;
  double least = std::numeric_limits<double>::infinity();
  for (const int tokens : {128, 192, 256}) {
    const int64_t tiles = ceil_div(p.n, columns) * ceil_div(p.m, tokens);
    for (int split = 1; split <= 4 && split <= blocks; split *= 2) {
      const double time = rounds.time(tiles, blocks, split, tokens / 256.0);
      if (time < least) best = {MainLoop::kTiled, tokens, split, {}};
      least = std::min(least, time);
    }
  }
  return best;
}

// Tiled kernels store whole vectors of 16 bytes.
bool takes_tiles(const CodedProblem& p, const Gpu& gpu) {
  return gpu.major == 9 && gpu.minor == 0 && p.m <= kMostTiledRows && p.n % 8 == 0;
}

}  // namespace

Refusal choose_coded(const CodedProblem& p, const Gpu& gpu, CodedPlan* plan) {
  if (gpu.major < 8) return Refusal::kGpu;
  if (const Refusal refusal = refusal_of_operands(p); refusal != Refusal::kNone) return refusal;
  if (p.m > kMostStreamedRows) {
    if (!takes_tiles(p, gpu)) return Refusal::kTorchIsFaster;
    *plan = choose_tiled(p, gpu);
    return Refusal::kNone;
  }
  const CodedKernel* chosen = nullptr;
  for (const CodedKernel& kernel : kKernels) {
    if (kernel.shared_bytes() > gpu.shared_of_cta) continue;
    chosen = &kernel;
    if (kernel.tokens >= p.m) break;
  }
  if (chosen == nullptr) return Refusal::kGpu;
  *plan = choose_streamed(p, *chosen, gpu);
  return Refusal::kNone;
}

cudaError_t launch_coded(const CodedProblem& p, const CodedPlan& plan, const Gpu& gpu, cudaStream_t stream) {
  if (plan.loop == MainLoop::kTiled) return launch_coded_tiled(p, plan, stream);
  return p.dtype == DType::kFloat16 ? launch_coded_fp16(p, plan, gpu, stream) : launch_coded_bf16(p, plan, gpu, stream);
}

}  // namespace fused_mlp
