#pragma once

#include <cstdint>

// The norms and scales of a block, on an MLP's input and its result, for the kernels of every backend.
namespace fused_mlp {

// The codes of the ops. kRmsOfOneMore, kLayerOfOneMore: RMSNorm or LayerNorm whose weight is stored minus 1; kScale:
// multiplies by the weight, without a norm.
enum class NormKind { kNone, kLayer, kRms, kRmsOfOneMore, kScale, kLayerOfOneMore };

// kNone: norm(x); kNormed: norm(residual + factor * x); kAdded: residual + factor * norm(x)
enum class Residual { kNone, kNormed, kAdded };

// A weight or a bias: a value per feature, or null if there is none. If `stride` is 0, all rows share these values.
// Otherwise each group of `rows` rows has its own, `stride` elements after those of the group before. `wide`: the
// values are float32, and the rows 16-bit.
struct Features {
  const void* data;
  int64_t rows, stride;
  bool wide;
};
inline constexpr Features kNoFeatures{nullptr, 1, 0, false};

// Without a weight it is one, without a bias zero. `rounded`: the normalised value is rounded before it is multiplied
// by the weight, for modules whose code casts it first.
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
