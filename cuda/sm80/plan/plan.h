// The kernels of sm_80, and which of them is estimated to be the fastest.
#pragma once

#include <array>
#include <iterator>

#include "../../../torch-ext/ops/plan.h"
#include "../../gemm/gpu.h"
#include "../../gemm/problem.h"
#include "../shape.h"

namespace fused_mlp::sm80 {

constexpr int parts(Product product) { return is_gated(product) ? 2 : 1; }

struct ListedKernel {
  GemmKernel kernel;
  Shape shape;
  int shared_bytes;
};

constexpr ListedKernel streamed(Product product, int tokens, int columns, int block_k, int warps_m, int warps_k,
                                int ctas, int stages) {
  const Shape shape = streamed_shape(parts(product), tokens, columns, block_k, warps_m, warps_k, ctas, stages);
  return {{MainLoop::kStreamed, product, tokens, parts(product) * columns, Schedule::kSwapped, 1, stages * block_k},
          shape,
          streamed_shared_bytes(shape)};
}

constexpr ListedKernel tiled(Product product, int block_m, int block_n, int block_k, int warps_m, int warps_n,
                             int stages) {
  const Shape shape = tiled_shape(block_m, block_n, block_k, warps_m, warps_n, stages);
  return {{MainLoop::kTiled, product, block_m, block_n, Schedule::kCooperative, 1, stages * block_k},
          shape,
          tiled_shared_bytes(shape)};
}

// The kernels of kernels.def.
inline constexpr ListedKernel kListed[] = {
#define FUSED_MLP_STREAMED(PRODUCT, ...) streamed(Product::k##PRODUCT, __VA_ARGS__),
#define FUSED_MLP_TILED(PRODUCT, ...) tiled(Product::k##PRODUCT, __VA_ARGS__),
#include "kernels.def"
};
inline constexpr auto kKernels = [] {
  std::array<GemmKernel, std::size(kListed)> kernels{};
  for (size_t i = 0; i < kernels.size(); ++i) kernels[i] = kListed[i].kernel;
  return kernels;
}();

// A launch finds its kernel by these.
static_assert(
    [] {
      for (size_t i = 0; i < kKernels.size(); ++i) {
        for (size_t j = 0; j < i; ++j) {
          if (kKernels[i] == kKernels[j]) return false;
        }
      }
      return true;
    }(),
    "two kernels have the same tile and ring");

// True if a streamed kernel of so many CTAs starts while the one before it drains, to read weights meanwhile: where
// that was measured. Few CTAs come to whatever multiprocessors are free first, next to one another, and share a way to
// L2: where each has much to read, that takes longer than the start.
inline bool starts_early(const GemmProblem& p, const Shape& shape, int64_t ctas, const Gpu& gpu) {
  constexpr int64_t kMuch = 768 << 10;
  const bool spread = 3 * ctas >= 2 * gpu.multiprocessors;
  return p.follows_ours() && gpu.major == 9 && (spread || shape.rows_m * p.k * 2 <= kMuch);
}

// True if the choice on a GPU is among others of a kernel, by its place in the list: of those that differ only in their
// ring, it is of the first that the GPU has room for.
bool offered(size_t place, const Gpu& gpu);

// The kernel that is estimated to take the least time, of those offered.
GemmPlan choose(const GemmProblem& problem, const Gpu& gpu);

// The streamed kernel of the least estimated time on a Hopper GPU, which has kernels of its own: beside_sm90.cpp. Of
// infinite time where none is to be considered.
GemmPlan choose_beside_sm90(const GemmProblem& problem, const Gpu& gpu);

// kNone, with the plan in *plan, where the GPU's model says that a kernel of ours is the faster way, with a margin.
Refusal decide(const GemmProblem& problem, const Gpu& gpu, GemmPlan* plan);

}  // namespace fused_mlp::sm80
