// A product of matrices with an epilogue, and the kernels that may compute it. This is included in device code, and in
// the choice of a kernel, which is plain C++: it includes no CUDA header, and of the standard library <cstdint> alone.
#pragma once

#include <cstdint>

#include "../../torch-ext/operands/activation.h"
#include "../../torch-ext/operands/matrix.h"

namespace fused_mlp {

// Which products a kernel accumulates for an output element.
enum class Product {
  kPlain,  // a weight^T
  kGated,  // a weight^T and a up_weight^T, side by side
  // Those of training. Where weights are not transposed, they are [k, n], and are read as they lie.
  kPlainKept,      // kPlain and
  kGatedKept,      // kGated, whose sums are stored beside the results
  kPlainGradient,  // a weight: the gradient of act(gate), of which the gradient of gate is made at once
  kGatedGradient,  // a weight: the gradient of act(gate) * up, of which those of gate and up are made at once
  kPair,           // a weight + second_a second_weight, or one to three such products
};

constexpr bool is_training(Product product) { return product > Product::kGated; }
constexpr bool is_gated(Product product) { return product == Product::kGated || product == Product::kGatedKept; }
constexpr bool is_kept(Product product) { return product == Product::kPlainKept || product == Product::kGatedKept; }
constexpr bool is_gradient(Product product) {
  return product == Product::kPlainGradient || product == Product::kGatedGradient;
}
constexpr bool reads_weights_as_they_lie(Product product) { return is_gradient(product) || product == Product::kPair; }

// The matrices [m, n] that a product's epilogue reads or writes. The pointwise kernel behind torch's GEMM that does the
// same moves as many.
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

// The matrices [m, n] that are moved behind torch's GEMM to the same end: by a pointwise kernel; behind the gradient of
// the hidden values by another one, which makes these again; of a pair, by each GEMM but the first.
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

// Operands of the epilogue, which takes the sums before they are rounded and stored: epilogue.cuh.
struct EpilogueArgs {
  const void* bias;     // [n], added to a weight^T, or null
  const void* up_bias;  // [n], added to a up_weight^T, or null
  int64_t activation;   // a code of activation.h
  // Rows [m, n], or none where the data is null. The rounded results, times `factor`, are added to them and rounded
  // again. Only streamed kernels of kPlain do so.
  Matrix addend = kNoMatrix;
  float factor = 1.0f;

  bool operator==(const EpilogueArgs&) const = default;
};

// Operands of products of training. All are [m, n] but the operands of a pair.
struct TrainingMatrices {
  // Operands of a pair's second and third product, whose weights are null where there are none.
  Matrix second_a, second_weight, third_a, third_weight;
  Matrix gate, up;  // values before the activation, biases included: kept products write, gradients read
  // Written by gradients, whose `out` is act(gate) * up again, or null. These may be gate and up themselves.
  Matrix gate_gradient, up_gradient;

  bool operator==(const TrainingMatrices&) const = default;
};

// A product of few columns that is added to the sums: rows of which the first k columns are multiplied by weight^T,
// [n, k], and those from up_column on by up_weight^T, [n, up_k], for the sums of up. Columns between hold zeros. Of
// products that read their weights as they lie, weights are [k, n] and [up_k, n], and a pair adds both. There is none
// where k and up_k are 0.
struct LowRank {
  Matrix rows = kNoMatrix, weight = kNoMatrix, up_weight = kNoMatrix;
  int64_t k = 0, up_k = 0, up_column = 0;
  // Where it is there, [k, k of the GEMM], the rows are not: they are scale a factor^T, which the kernel makes itself.
  // Only streamed kernels of kPlain do so, for few rows and columns.
  Matrix factor = kNoMatrix;
  // A mask of dropout (dropout.h) for what the term adds to a gradient, times `scale`; null where there is none.
  const uint32_t* kept = nullptr;
  int64_t words_of_row = 0;
  float scale = 1.0f;

  constexpr bool makes_rows() const { return factor.data != nullptr; }
  constexpr int64_t columns() const { return up_k > 0 ? up_column + up_k : k; }

  explicit constexpr operator bool() const { return k + up_k > 0; }
  bool operator==(const LowRank&) const = default;
};

// Kernels that make an adapter's rows do so for so few rows of a, and of the factor.
constexpr int kMostRankTermRows = 32, kMostRankTermRanks = 16;

// Columns [column, column + rank) of the result are scale * x a^T, a [rank, k].
struct RankFactor {
  Matrix a;
  int64_t rank;
  int64_t column;
  float scale;
};

// Up to two factors of the same x [m, k]; the rank of one that is not there is 0.
struct RankRows {
  Matrix x, out;
  int64_t m, k;
  RankFactor factors[2];
  DType dtype;
};

// out = act(a weight^T + bias), or, where up_weight.data is not null,
// out = act(a weight^T + bias) * (a up_weight^T + up_bias).
// a [m, k], weights [n, k], out [m, n]; sums are fp32 and are rounded once. Weights of gradients and pairs: [k, n].
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
  // The number of CTAs that the launch before this one in the stream has at most, where it is a kernel of ours that did
  // not write the weights: this one may start, and read its weights, while that one drains. 0 for any other launch.
  int64_t ctas_before;
  bool behind_norm;  // which that kernel is
  // kPlain stands for itself and for kGated: which of the two it is, up_weight says.
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
  // The products of a pair.
  int terms() const { return 1 + (training.second_weight.data != nullptr) + (training.third_weight.data != nullptr); }
  bool linear() const { return epilogue.activation == static_cast<int64_t>(Activation::kLinear); }
};

// The facts of the call around its first product.
struct Place {
  int64_t ctas_before = 0;  // that of GemmProblem
  bool in_block = false;    // true if the call computes a block of a model: an MLP with its residual
};

// The launcher of a product. A graph's launch costs nothing for each of its kernels.
enum class Launcher { kGraph, kCpu, kCpuInBlock };

// The bounds of a gated product, as gpt-oss has them: gates count as `limit` at most, ups as that in magnitude, and
// `up_offset` is added to the ups.
struct GateLimits {
  float limit, up_offset;
};

enum class MainLoop {
  kTiled,     // for many rows: persistent CTAs, each computing large tiles of the output
  kStreamed,  // for few rows: bound by the reading of the weights, which pass through small tiles
};

// The division of a CTA's tiles among its warpgroups, and which operand is the M side of the tensor cores'
// instructions.
enum class Schedule {
  kPingPong,         // M side: rows of a. The warpgroups take a tile each in turn.
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
  int block_n;  // weight rows in a tile: of a gated product, half are the gate's and half are up's
  Schedule schedule;
  int split_k;   // CTAs of a cluster that share one output tile, each with a part of k
  int ring = 0;  // elements of k in shared memory at a time, where it takes that to tell two kernels apart

  // Columns of the output in a tile.
  constexpr int columns() const { return is_gated(product) ? block_n / 2 : block_n; }
  bool operator==(const GemmKernel&) const = default;
};

// The CTAs of a kernel, were it to run all at once.
constexpr int64_t ctas_of(const GemmProblem& p, const GemmKernel& kernel) {
  return ceil_div(p.m, kernel.block_m) * ceil_div(p.n, kernel.columns()) * kernel.split_k;
}

struct Architecture;  // architecture.h

struct GemmPlan {
  GemmKernel kernel;
  double microseconds;                         // estimated
  const Architecture* architecture = nullptr;  // whose kernel it is, where choose_gemm() has chosen it
  double hidden = 0.0;  // microseconds of these that pass while the kernel before drains, where it starts early

  // The rest of its time behind the kernel before, where that leaves it room, and where it leaves it little.
  constexpr double shortest() const { return microseconds - hidden; }
  constexpr double longest() const {
    constexpr double kSurelyHidden = 1.0;
    return microseconds - (hidden < kSurelyHidden ? hidden : kSurelyHidden);
  }
};

// The part of the time that a GEMM before would hide that is hidden. A norm is shorter (measured in blocks on an
// H100).
constexpr double hidden_behind(const GemmProblem& p, double gemm) {
  constexpr double kNorm = 1.3;
  return p.behind_norm && gemm > kNorm ? kNorm : gemm;
}

// Rates that the memory and the tensor cores of a GPU reach, as measured on one of the architecture.
struct Peak {
  double bytes_per_microsecond, flops_per_microsecond;
};

}  // namespace fused_mlp
