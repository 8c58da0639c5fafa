// The kernels of sm_80, and which of them is estimated to be the fastest.
#pragma once

#include <array>
#include <iterator>

#include "../../torch-ext/plan.h"
#include "../gemm/gpu.h"
#include "../gemm/problem.h"
#include "shape.h"

namespace fused_mlp::sm80 {

constexpr int parts(Product product) { return product == Product::kGated ? 2 : 1; }

struct ListedKernel {
  GemmKernel kernel;
  Shape shape;
  int shared_bytes;
};

constexpr ListedKernel streamed(Product product, int tokens, int columns, int block_k, int stages) {
  const Shape shape = streamed_shape(parts(product), tokens, columns, block_k, stages);
  return {{MainLoop::kStreamed, product, tokens, parts(product) * columns, Schedule::kSwapped, 1},
          shape,
          streamed_shared_bytes(shape)};
}

constexpr ListedKernel tiled(Product product, int block_m, int block_n, int block_k, int warps_m, int warps_n,
                             int stages) {
  const Shape shape = tiled_shape(block_m, block_n, block_k, warps_m, warps_n, stages);
  return {{MainLoop::kTiled, product, block_m, block_n, Schedule::kCooperative, 1}, shape, tiled_shared_bytes(shape)};
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
    "two kernels have the same tile");

// Whether there is code of the kernel for a GPU, which has the shared memory for it. 8.7 has as much as 8.0, but runs
// the code of 8.6.
constexpr bool has_code(const ListedKernel& listed, const Gpu& gpu) {
  const bool large = (gpu.major == 8 || gpu.major == 9) && gpu.minor == 0;
  return listed.shared_bytes <= (large ? gpu.shared_of_cta : kLeastSharedOfCta);
}

// The kernel that is estimated to take the least time, of those that there is code for.
GemmPlan choose(const GemmProblem& problem, const Gpu& gpu);

// kNone, with the plan in *plan, where the GPU's model says that a kernel of ours is the faster way, with a margin.
Refusal decide(const GemmProblem& problem, const Gpu& gpu, GemmPlan* plan);

}  // namespace fused_mlp::sm80
