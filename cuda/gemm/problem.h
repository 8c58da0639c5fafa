// A product of matrices with an epilogue, and the kernels that may compute it. This is included in device code and in
// the choice of a kernel, which is plain C++, so it includes no CUDA header, and of the standard library only
// <cstdint>.
#pragma once

#include <cstdint>

#include "../../torch-ext/operands/activation.h"
#include "../../torch-ext/operands/matrix.h"

namespace fused_mlp {

// The products that a kernel accumulates for an output element.
enum class Product {
  kPlain,  // a weight^T
  kGated,  // a weight^T and a up_weight^T, side by side
  // The products of training. Weights that are not transposed are [k, n], and are read in that layout.
  kPlainKept,      // kPlain and
  kGatedKept,      // kGated, which also stores its sums
  kPlainGradient,  // a weight: the gradient of act(gate), from which the gradient of gate is computed at once
  kGatedGradient,  // a weight: the gradient of act(gate) * up, from which those of gate and up are computed at once
  kPair,           // a weight + second_a second_weight, or one to three such products
};

constexpr bool is_training(Product product) { return product > Product::kGated; }
constexpr bool is_gated(Product product) { return product == Product::kGated || product == Product::kGatedKept; }
constexpr bool is_kept(Product product) { return product == Product::kPlainKept || product == Product::kGatedKept; }
constexpr bool is_gradient(Product product) {
  return product == Product::kPlainGradient || product == Product::kGatedGradient;
}
constexpr bool reads_weights_as_they_lie(Product product) { return is_gradient(product) || product == Product::kPair; }

// The number of matrices [m, n] that a product's epilogue reads or writes. A pointwise kernel after torch's GEMM that
// does the same moves as many.
constexpr int moved_matrices(Product product) {
  switch (product) {
    case Product::kPlainKept:
      return 2;
    case Product::kGatedKept:
    case Product::kPlainGradient:
      return 3;
    case Product::kGatedGradient:
      return 5;
    default:
      return 1;
  }
}

// The number of matrices [m, n] moved after torch's GEMM for the same result: by a pointwise kernel; after the gradient
// of the hidden values by another one, which recomputes them; for a pair, by each GEMM except the first.
constexpr int composed_matrices(Product product) {
  switch (product) {
    case Product::kPlainGradient:
      return moved_matrices(product) + moved_matrices(Product::kPlainKept);
    case Product::kGatedGradient:
      return moved_matrices(product) + moved_matrices(Product::kGatedKept);
    case Product::kPair:
      return 2;
    default:
      return moved_matrices(product);
  }
}

// Operands of the epilogue, which processes the sums before they are rounded and stored: epilogue.cuh.
struct EpilogueArgs {
  const void* bias;     // [n], added to a weight^T, or null
  const void* up_bias;  // [n], added to a up_weight^T, or null
  int64_t activation;   // a code of activation.h
  // Rows [m, n], or none if the data is null. The rounded results, times `factor`, are added to them and rounded again.
  // Only streamed kernels of kPlain support this.
  Matrix addend = kNoMatrix;
  float factor = 1.0f;

  bool operator==(const EpilogueArgs&) const = default;
};

// Operands of products of training. All are [m, n] except the operands of a pair.
struct TrainingMatrices {
  // Operands of a pair's second and third product; their weights are null if there are none.
  Matrix second_a, second_weight, third_a, third_weight;
  Matrix gate, up;  // values before the activation, biases included: kept products write, gradients read
  // Written by gradients. Their `out` is act(gate) * up again, or null. These may be gate and up themselves.
  Matrix gate_gradient, up_gradient;

  bool operator==(const TrainingMatrices&) const = default;
};

// A low-rank term that is added to the sums. The first k columns of its rows are multiplied by weight^T, [n, k], and
// those from up_column by up_weight^T, [n, up_k], for the sums of up. Columns between hold zeros. For products that
// read weights in their own layout, weights are [k, n] and [up_k, n], and a pair adds both. There is no term if k and
// up_k are 0.
struct LowRank {
  Matrix rows = kNoMatrix, weight = kNoMatrix, up_weight = kNoMatrix;
  int64_t k = 0, up_k = 0, up_column = 0;
  // A dropout mask (dropout.h) for what the term adds to a gradient, times `scale`; null if there is none.
  const uint32_t* kept = nullptr;
  int64_t words_of_row = 0;
  float scale = 1.0f;

  constexpr int64_t columns() const { return up_k > 0 ? up_column + up_k : k; }

  explicit constexpr operator bool() const { return k + up_k > 0; }
  bool operator==(const LowRank&) const = default;
};

// Columns [column, column + rank) of the result are scale * x a^T, a [rank, k].
struct RankFactor {
  Matrix a;
  int64_t rank;
  int64_t column;
  float scale;
};

// Up to two factors for the same x [m, k]; the rank of a missing one is 0.
struct RankRows {
  Matrix x, out;
  int64_t m, k;
  RankFactor factors[2];
  DType dtype;
};

// out = act(a weight^T + bias), or, if up_weight.data is not null, out = act(a weight^T + bias) * (a up_weight^T +
// up_bias). a [m, k], weights [n, k], out [m, n]; sums are fp32 and are rounded once. Weights of gradients and pairs:
// [k, n].
struct GemmProblem {
  Matrix a;
  Matrix weight;
  Matrix up_weight;
  Matrix out;
  int64_t m;
  int64_t n;
  int64_t k;
  DType dtype;
  EpilogueArgs epilogue;
  // The maximum number of CTAs of the previous launch in the stream, if that is a kernel of ours that did not write the
  // weights: this kernel may then start, and read its weights, while that one drains. 0 for any other launch.
  int64_t ctas_before;
  bool behind_norm;  // that kernel is a norm
  // kPlain stands for itself and for kGated; up_weight tells which.
  Product kind = Product::kPlain;
  TrainingMatrices training{};
  LowRank low_rank{};

  bool operator==(const GemmProblem&) const = default;

  Product product() const {
    if (is_training(kind)) return kind;
    return up_weight.data == nullptr ? Product::kPlain : Product::kGated;
  }
  bool follows_ours() const { return ctas_before > 0; }
  bool gated() const { return is_gated(product()); }
  bool pair() const { return product() == Product::kPair; }
  // The number of products of a pair.
  int terms() const { return 1 + (training.second_weight.data != nullptr) + (training.third_weight.data != nullptr); }
  bool linear() const { return epilogue.activation == static_cast<int64_t>(Activation::kLinear); }
};

// The facts about the call before its first product.
struct Place {
  int64_t ctas_before = 0;  // as in GemmProblem
  bool in_block = false;    // true if the call computes a block of a model: an MLP with its residual
};

// How a product is launched. In a graph the launch of each kernel costs nothing.
enum class Launcher { kGraph, kCpu, kCpuInBlock };

// The limits of a gated product, as in gpt-oss: gates are clamped to at most `limit`, ups to [-limit, limit], and
// `up_offset` is added to the ups.
struct GateLimits {
  float limit, up_offset;
};

enum class MainLoop {
  kTiled,     // for many rows: persistent CTAs, each computing large tiles of the output
  kStreamed,  // for few rows: bound by reading the weights, which are streamed through small tiles
};

// The division of a CTA's tiles among its warpgroups, and the operand that is the M side of the tensor cores'
// instructions.
enum class Schedule {
  kPingPong,         // M side: rows of a. The warpgroups alternate between tiles.
  kCooperative,      // M side: rows of a. Each warpgroup computes half the rows of every tile.
  kSwapped,          // M side: weight rows. Each warpgroup computes half the columns of every tile.
  kSwappedHalfRows,  // M side: weight rows. Each warpgroup computes all the columns for half the rows of a.
};

constexpr const char* name(MainLoop loop) { return loop == MainLoop::kTiled ? "tiled" : "streamed"; }

constexpr const char* name(Schedule schedule) {
  constexpr const char* kNames[] = {"ping_pong", "cooperative", "swapped", "swapped_half_rows"};
  return kNames[static_cast<int>(schedule)];
}

struct GemmKernel {
  MainLoop loop;
  Product product;
  int block_m;  // rows of a in a tile
  int block_n;  // weight rows in a tile: for a gated product, half are the gate's and half are up's
  Schedule schedule;
  int split_k;   // CTAs of a cluster that share one output tile, each with a part of k
  int ring = 0;  // elements of k in shared memory at a time, if needed to tell two kernels apart

  // Columns of the output in a tile.
  constexpr int columns() const { return is_gated(product) ? block_n / 2 : block_n; }
  bool operator==(const GemmKernel&) const = default;
};

// The number of CTAs of a kernel if all ran at once.
constexpr int64_t ctas_of(const GemmProblem& p, const GemmKernel& kernel) {
  return ceil_div(p.m, kernel.block_m) * ceil_div(p.n, kernel.columns()) * kernel.split_k;
}

struct Architecture;  // architecture.h

struct GemmPlan {
  GemmKernel kernel;
  double microseconds;                         // estimated
  const Architecture* architecture = nullptr;  // the kernel's architecture, if choose_gemm() has chosen it
  double hidden = 0.0;  // microseconds of these that pass while the previous kernel drains, if it starts early

  // The rest of its time after the previous kernel: if that one leaves it room, and if it leaves little.
  constexpr double shortest() const { return microseconds - hidden; }
  constexpr double longest() const {
    constexpr double kSurelyHidden = 1.0;
    return microseconds - (hidden < kSurelyHidden ? hidden : kSurelyHidden);
  }
};

// The hidden part of the time that a GEMM before would hide. A norm is shorter (measured in blocks on an H100).
constexpr double hidden_behind(const GemmProblem& p, double gemm) {
  constexpr double kNorm = 1.3;
  return p.behind_norm && gemm > kNorm ? kNorm : gemm;
}

// Rates that the memory and the tensor cores of a GPU reach, as measured on a GPU of the architecture.
struct Peak {
  double bytes_per_microsecond, flops_per_microsecond;
};

}  // namespace fused_mlp
