// The kernels of sm_80, and the choice of the one that is estimated to be the fastest.
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

// A launch finds its kernel by these fields.
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

// True if a streamed kernel of this many CTAs starts while the one before it drains, to read weights meanwhile; only
// where that was measured. Few CTAs are placed on whatever multiprocessors are free first, which are neighbours and
// share a path to L2: if each has much to read, that costs more time than the early start saves.
inline bool starts_early(const GemmProblem& p, const Shape& shape, int64_t ctas, const Gpu& gpu) {
  constexpr int64_t kMuch = 768 << 10;
  const bool spread = 3 * ctas >= 2 * gpu.multiprocessors;
  return p.follows_ours() && gpu.major == 9 && (spread || shape.rows_m * p.k * 2 <= kMuch);
}

// True if a kernel, by its index in the list, is a candidate on a GPU: of those that differ only in their ring, the
// first that the GPU has room for.
bool offered(size_t place, const Gpu& gpu);

// The candidate with the lowest estimated time.
GemmPlan choose(const GemmProblem& problem, const Gpu& gpu);

// The streamed kernel with the lowest estimated time on a Hopper GPU, which has its own kernels: beside_sm90.cpp. The
// time is infinite if there is no candidate.
GemmPlan choose_beside_sm90(const GemmProblem& problem, const Gpu& gpu);

// kNone, with the plan in *plan, if the GPU's model says that a kernel of ours is faster by a margin.
Refusal decide(const GemmProblem& problem, const Gpu& gpu, GemmPlan* plan);

}  // namespace fused_mlp::sm80
