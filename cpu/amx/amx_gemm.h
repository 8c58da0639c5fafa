#pragma once

#include <cstdint>

#include "../quantized/codes.h"

// Products of bf16 matrices on AMX tiles, for the layers of an MLP. The rows of a result tile are features, its columns
// are tokens. This way the weights can be read as they lie, [out, in], and a layer's result leaves the tiles in the
// order in which the next layer reads its input.
namespace fused_mlp::amx {

// Tokens are handled in pairs of tiles: their number is padded to a multiple of 32.
constexpr int64_t kTokens = 32;
// Input features are padded to a multiple of 32, the depth of a tile.
constexpr int64_t kDepth = 32;

constexpr int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// The size, in elements, of a group of tokens as pack_tokens() lays it out.
constexpr int64_t packed_size(int64_t tokens, int64_t features) {
  return round_up(tokens, kTokens) * round_up(features, kDepth);
}

// A bf16 weight [out, in], whose rows are row_stride elements apart, and a bias [out] or nullptr. Either the elements
// of a row are adjacent, or, where column_stride is not 1, row_stride is 1, or 2 where the rows of two weights
// alternate.
struct Projection {
  const uint16_t* weight;
  int64_t row_stride;
  const uint16_t* bias;
  int64_t column_stride = 1;
  int64_t bias_stride = 1;
  // In the place of a weight: one that is quantised, and is decoded into tiles each time they are multiplied.
  const quantized::Codes* codes = nullptr;
};

// act(x weight^T + bias), times (x up_weight^T + up_bias) if gated.
struct Layer {
  Projection gate, up;
  bool gated;
  int64_t in_features, out_features;
  int64_t activation;
  // With limits, gates count as `limit` at most, and ups as that in magnitude, to which up_offset is added then.
  bool limited = false;
  float limit = 0, up_offset = 0;
  // The weights as pack_weights() lays them out, or null.
  const uint16_t* packed = nullptr;

  // The unit of work is a panel of output features. It has 32 rows of weights: all of one tensor, or 16 of each of two.
  int64_t panel_features() const { return gated ? 16 : 32; }
  int64_t panels() const { return round_up(out_features, kDepth) / panel_features(); }
};

// The place of a hidden layer's values before the activation, for a backward: to rows of tokens; nowhere if there is no
// gate.
struct Kept {
  uint16_t *gate, *up;
  int64_t row_stride;
};

// The place of a layer's result: the rows of a tensor, or, where row_stride is 0, to the packed input of the next
// layer.
struct Destination {
  uint16_t* data;
  int64_t row_stride;
  Kept kept{};
  // For a layer that is a product alone: a row is a feature of all tokens, not a token, and is added to if asked.
  bool by_feature = false, accumulate = false;
};

// Brings tokens x [tokens, features], whose rows are row_stride elements apart, into the order in which project() reads
// them. With `rows`, token t is row rows[t] of x.
void pack_tokens(const uint16_t* x, int64_t row_stride, int64_t tokens, int64_t features, uint16_t* packed,
                 const int64_t* rows = nullptr);

// The same of tokens that are the columns of x [features, tokens].
void pack_columns(const uint16_t* x, int64_t row_stride, int64_t tokens, int64_t features, uint16_t* packed);

// Weights whose columns lie together are multiplied faster after they were brought into the order of the tiles, once
// for all blocks of tokens. It takes so many elements, and is done for the inputs [begin, end), which are multiples of
// kDepth but for the last.
int64_t packed_weights_size(const Layer& layer);
void pack_weights(const Layer& layer, int64_t begin, int64_t end, uint16_t* packed);

// The number of fp32 elements of scratch that project() needs for this many tokens or fewer.
int64_t scratch_size(const Layer& layer, int64_t tokens);

// Computes the panels [begin, end) of the layer's result.
void project(const Layer& layer, const uint16_t* packed, int64_t tokens, int64_t begin, int64_t end, float* scratch,
             Destination destination);

}  // namespace fused_mlp::amx
