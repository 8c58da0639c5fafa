#pragma once

#include <cstdint>

// The norms and scales of a block, on an MLP's input and its result, for the kernels of every backend.
namespace fused_mlp {

// The codes of the ops. kRmsOfOneMore, kLayerOfOneMore: RMSNorm or LayerNorm whose weight is stored less 1; kScale: the
// weight alone, no norm.
enum class NormKind { kNone, kLayer, kRms, kRmsOfOneMore, kScale, kLayerOfOneMore };

// kNone: norm(x); kNormed: norm(residual + factor * x); kAdded: residual + factor * norm(x)
enum class Residual { kNone, kNormed, kAdded };

// A weight or a bias: a value for each feature, or null where there is none. Where `stride` is 0, all rows share these
// values. Else each group of `rows` rows has its own, `stride` elements behind those of the group before. `wide`: the
// values are of float32, and the rows of 16 bits.
struct Features {
  const void* data;
  int64_t rows, stride;
  bool wide;
};
inline constexpr Features kNoFeatures{nullptr, 1, 0, false};

// No weight stands for ones, no bias for zeros. `rounded`: what is normed is rounded before the weight, as where a
// module's code casts it first.
struct Norm {
  NormKind kind;
  Features weight, bias;
  float eps;
  Residual residual;
  float factor;
  bool rounded = false;

  constexpr bool centred() const { return kind == NormKind::kLayer || kind == NormKind::kLayerOfOneMore; }
  constexpr bool normed() const { return kind != NormKind::kNone && kind != NormKind::kScale; }
  constexpr float weight_offset() const {
    return kind == NormKind::kRmsOfOneMore || kind == NormKind::kLayerOfOneMore ? 1.0f : 0.0f;
  }
};

}  // namespace fused_mlp
