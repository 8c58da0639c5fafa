#pragma once

// What a block does to the rows of an MLP's input and of its result, for the kernels of every backend.
namespace fused_mlp {

// The codes of the ops. kRmsOfOneMore: RMSNorm whose weight is stored less 1; kScale: the weight alone, no norm.
enum class NormKind { kNone, kLayer, kRms, kRmsOfOneMore, kScale };

// kNone: norm(x); kNormed: norm(residual + factor * x); kAdded: residual + factor * norm(x)
enum class Residual { kNone, kNormed, kAdded };

// A null weight stands for ones, a null bias for zeros.
struct Norm {
  NormKind kind;
  const void *weight, *bias;
  float eps;
  Residual residual;
  float factor;

  constexpr bool centred() const { return kind == NormKind::kLayer; }
  constexpr bool normed() const { return kind != NormKind::kNone && kind != NormKind::kScale; }
  constexpr float weight_offset() const { return kind == NormKind::kRmsOfOneMore ? 1.0f : 0.0f; }
};

}  // namespace fused_mlp
