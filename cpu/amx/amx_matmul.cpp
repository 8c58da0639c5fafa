#include "amx_matmul.h"

#if defined(__x86_64__)

#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "../../torch-ext/operands/activation.h"
#include "../../torch-ext/operands/operands.h"
#include "../scratch.h"
#include "amx_blocks.h"

namespace fused_mlp::amx {

using torch::stable::Tensor;

namespace {

const uint16_t* data(const Tensor& matrix) { return static_cast<const uint16_t*>(matrix.const_data_ptr()); }

bool has_adjacent_columns(const Tensor& matrix) { return matrix.stride(1) == 1; }

bool has_adjacent_elements(const Tensor& matrix) { return has_adjacent_columns(matrix) || matrix.stride(0) == 1; }

}  // namespace

bool takes_matmul(const Tensor& a, const Tensor& b) {
  const int64_t least = std::min({a.size(0), a.size(1), b.size(1)});
  return least >= kLeastOfMatmul && has_adjacent_elements(a) && has_adjacent_elements(b);
}

// The columns of b are the tokens, and a's rows are the weights of features, so a tile of sums has rows of `out`.
void matmul(const Tensor& out, const Tensor& a, const Tensor& b, bool accumulate) {
  // The number of features for which a column-major left matrix is packed into tiles at once. Blocks of tokens that are
  // not cached are packed again for each of these parts, which must be large enough to make that cheap.
  constexpr int64_t kFeaturesAtOnce = 512;
  const int64_t depth = a.size(1), columns = b.size(1), features = a.size(0);
  const bool by_rows = has_adjacent_columns(a);
  const int64_t at_once = by_rows ? features : std::min(features, kFeaturesAtOnce);
  const auto part_of = [&](int64_t begin) {
    const Projection weight =
        by_rows ? Projection{data(a), a.stride(0), nullptr} : Projection{data(a) + begin, 1, nullptr, a.stride(1)};
    return Layer{
        weight, {}, false, depth, std::min(at_once, features - begin), static_cast<int64_t>(Activation::kLinear)};
  };
  const Layer longest = part_of(0);
  const Blocks blocks(columns, longest.panels());
  const int64_t packed = packed_size(blocks.longest(), depth);
  const int64_t weights_size = by_rows ? 0 : packed_weights_size(longest);
  const int64_t sums_size = scratch_size(longest, blocks.longest());
  const int64_t sums_at = (weights_size + blocks.slots() * packed) * 2;
  const Scratch workspace(sums_at + blocks.threads() * sums_size * 4);
  uint16_t* const weights = workspace.at<uint16_t>(0);
  uint16_t* const tokens = weights + weights_size;
  float* const sums = workspace.at<float>(sums_at);

  for (int64_t begin = 0; begin < features; begin += at_once) {
    Layer layer = part_of(begin);
    if (!by_rows) {
      constexpr int64_t kGrain = 8192;  // minimum number of weights per thread
      torch::stable::parallel_for(0, ceil_div(depth, kDepth), ceil_div(kGrain, layer.out_features * kDepth),
                                  [&](int64_t first, int64_t last) {
                                    pack_weights(layer, first * kDepth, std::min(last * kDepth, depth), weights);
                                  });
      layer.packed = weights;
    }
    const auto pack = [&](const Block& block) {
      if (begin > 0 && blocks.holds_all()) return;
      uint16_t* const to = tokens + block.slot * packed;
      if (has_adjacent_columns(b)) {
        pack_columns(data(b) + block.begin, b.stride(0), block.tokens, depth, to);
      } else {
        pack_tokens(data(b) + block.begin * b.stride(1), b.stride(1), block.tokens, depth, to);
      }
    };
    uint16_t* const rows = static_cast<uint16_t*>(out.mutable_data_ptr()) + begin * out.stride(0);
    const auto multiply = [&](const Block& block, const Share& share) {
      project(layer, tokens + block.slot * packed, block.tokens, share.begin(layer), share.end(layer),
              sums + share.thread * sums_size, {rows + block.begin, out.stride(0), {}, true, accumulate});
    };
    blocks.run(pack, multiply);
  }
}

}  // namespace fused_mlp::amx

#endif
