#pragma once

#include <cstdint>

#include "../quantized/codes.h"

// Products of bf16 matrices on AMX tiles, for the layers of an MLP. The rows of a result tile are features, its columns
// are tokens. This way weights [out, in] can be read in their own layout, and a layer's result leaves the tiles in the
// order in which the next layer reads its input.
namespace fused_mlp::amx {

// Tokens are handled in pairs of tiles: their number is padded to a multiple of 32.
constexpr int64_t kTokens = 32;
// Input features are padded to a multiple of 32, the depth of a tile.
constexpr int64_t kDepth = 32;

constexpr int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// The size, in elements, of a group of tokens in the layout of pack_tokens().
constexpr int64_t packed_size(int64_t tokens, int64_t features) {
  return round_up(tokens, kTokens) * round_up(features, kDepth);
}

// A bf16 weight [out, in], whose rows are row_stride elements apart, and a bias [out] or nullptr. Either the elements
// of a row are adjacent, or column_stride is not 1, and row_stride is 1, or 2 if the rows of two weights alternate.
struct Projection {
  const uint16_t* weight;
  int64_t row_stride;
  const uint16_t* bias;
  int64_t column_stride = 1;
  int64_t bias_stride = 1;
  // Instead of a weight: a quantised one, which is decoded into tiles each time that they are multiplied.
  const quantized::Codes* codes = nullptr;
};

// act(x weight^T + bias), times (x up_weight^T + up_bias) if gated.
struct Layer {
  Projection gate, up;
  bool gated;
  int64_t in_features, out_features;
  int64_t activation;
  // With limits, gates are clamped to at most `limit`, and ups to [-limit, limit]; then up_offset is added to ups.
  bool limited = false;
  float limit = 0, up_offset = 0;
  // The weights in the layout of pack_weights(), or null.
  const uint16_t* packed = nullptr;

  // The unit of work is a panel of output features. It has 32 rows of weights: all of one tensor, or 16 of each of two.
  int64_t panel_features() const { return gated ? 16 : 32; }
  int64_t panels() const { return round_up(out_features, kDepth) / panel_features(); }
};

// Where to store a hidden layer's values before the activation for a backward, as rows of tokens; nowhere if there is
// no gate.
struct Kept {
  uint16_t *gate, *up;
  int64_t row_stride;
};

// Where to store a layer's result: in the rows of a tensor, or, if row_stride is 0, in the packed input of the next
// layer.
struct Destination {
  uint16_t* data;
  int64_t row_stride;
  Kept kept{};
  // For a layer that is a plain product: a row is a feature of all tokens, not a token, and the product is added to it
  // if `accumulate`.
  bool by_feature = false, accumulate = false;
};

// Packs tokens x [tokens, features], whose rows are row_stride elements apart, in the order in which project() reads
// them. With `rows`, token t is row rows[t] of x.
void pack_tokens(const uint16_t* x, int64_t row_stride, int64_t tokens, int64_t features, uint16_t* packed,
                 const int64_t* rows = nullptr);

// The same for tokens that are the columns of x [features, tokens].
void pack_columns(const uint16_t* x, int64_t row_stride, int64_t tokens, int64_t features, uint16_t* packed);

// Column-major weights are multiplied faster if they are first packed in the order of the tiles, once for all blocks of
// tokens. This is the number of elements that the packed weights need. Packing handles inputs [begin, end), which are
// multiples of kDepth except the last.
int64_t packed_weights_size(const Layer& layer);
void pack_weights(const Layer& layer, int64_t begin, int64_t end, uint16_t* packed);

// The number of fp32 elements of scratch that project() needs for this many tokens or fewer.
int64_t scratch_size(const Layer& layer, int64_t tokens);

// Computes the panels [begin, end) of the layer's result.
void project(const Layer& layer, const uint16_t* packed, int64_t tokens, int64_t begin, int64_t end, float* scratch,
             Destination destination);

}  // namespace fused_mlp::amx
