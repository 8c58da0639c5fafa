#pragma once

#include <cstdint>

// bf16 matrix products on AMX tiles, for the layers of an MLP. A product of tiles holds features along its rows and
// tokens along its columns: so the weights are read as they are, [out, in], and a layer's result leaves the tiles in
// the very order in which the next layer wants its input.
namespace fused_mlp::amx {

// Tokens are handled in pairs of tiles; a group of them is padded to a multiple of 32.
constexpr int64_t kTokens = 32;
// Input features are padded to a multiple of 32, the depth of a tile.
constexpr int64_t kDepth = 32;

constexpr int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Elements of a packed group of tokens.
constexpr int64_t packed_size(int64_t tokens, int64_t features) {
  return round_up(tokens, kTokens) * round_up(features, kDepth);
}

// A bf16 weight [out, in], rows row_stride elements apart, and a bias [out] or nullptr.
struct Projection {
  const uint16_t* weight;
  int64_t row_stride;
  const uint16_t* bias;
};

// act(x weight^T + bias), times (x up_weight^T + up_bias) if gated.
struct Layer {
  Projection gate, up;
  bool gated;
  int64_t in_features, out_features;
  int64_t activation;

  // The unit of work is a panel of output features: 32 rows of weights, from one tensor or 16 from each of two.
  int64_t panel_features() const { return gated ? 16 : 32; }
  int64_t panels() const { return round_up(out_features, kDepth) / panel_features(); }
};

// Where a layer's result goes: the rows of a tensor, or (row_stride == 0) the packed input of the next layer.
struct Destination {
  uint16_t* data;
  int64_t row_stride;
};

// Tokens x [tokens, features], rows row_stride elements apart, into the order in which project() reads them.
void pack_tokens(const uint16_t* x, int64_t row_stride, int64_t tokens, int64_t features, uint16_t* packed);

// fp32 elements of scratch that project() needs for so many tokens or fewer.
int64_t scratch_size(const Layer& layer, int64_t tokens);

// The panels [begin, end) of the layer's result.
void project(const Layer& layer, const uint16_t* packed, int64_t tokens, int64_t begin, int64_t end, float* scratch,
             Destination destination);

}  // namespace fused_mlp::amx
