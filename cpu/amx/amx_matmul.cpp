#include "amx_matmul.h"

#if defined(__x86_64__)

#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "../../torch-ext/operands/activation.h"
#include "../../torch-ext/operands/operands.h"
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

// The columns of b are the tokens, and a's rows are the weights of features: then a tile of sums has rows of `out`.
void matmul(const Tensor& out, const Tensor& a, const Tensor& b, bool accumulate) {
  const int64_t depth = a.size(1), columns = b.size(1);
  const bool by_rows = has_adjacent_columns(a);
  Layer layer{{data(a), by_rows ? a.stride(0) : 1, nullptr, by_rows ? 1 : a.stride(1)},
              {},
              false,
              depth,
              a.size(0),
              static_cast<int64_t>(Activation::kLinear)};
  const Blocks blocks(columns, layer.panels());
  const int64_t packed = packed_size(blocks.longest(), depth), weights_size = by_rows ? 0 : packed_weights_size(layer);
  const int64_t sums_size = scratch_size(layer, blocks.longest());
  const Tensor workspace = new_dense(out, {weights_size + blocks.slots() * packed + blocks.threads() * sums_size * 2});
  uint16_t* const weights = static_cast<uint16_t*>(workspace.mutable_data_ptr());
  uint16_t* const tokens = weights + weights_size;
  float* const sums = reinterpret_cast<float*>(tokens + blocks.slots() * packed);
  uint16_t* const out_data = static_cast<uint16_t*>(out.mutable_data_ptr());

  if (!by_rows) {
    constexpr int64_t kGrain = 8192;  // weights worth a thread
    torch::stable::parallel_for(0, ceil_div(depth, kDepth), ceil_div(kGrain, a.size(0) * kDepth),
                                [&](int64_t begin, int64_t end) {
                                  pack_weights(layer, begin * kDepth, std::min(end * kDepth, depth), weights);
                                });
    layer.packed = weights;
  }
  const auto pack = [&](const Block& block) {
    uint16_t* const to = tokens + block.slot * packed;
    if (has_adjacent_columns(b)) {
      pack_columns(data(b) + block.begin, b.stride(0), block.tokens, depth, to);
    } else {
      pack_tokens(data(b) + block.begin * b.stride(1), b.stride(1), block.tokens, depth, to);
    }
  };
  const auto multiply = [&](const Block& block, const Share& share) {
    project(layer, tokens + block.slot * packed, block.tokens, share.begin(layer), share.end(layer),
            sums + share.thread * sums_size, {out_data + block.begin, out.stride(0), {}, true, accumulate});
  };
  blocks.run(pack, multiply);
}

}  // namespace fused_mlp::amx

#endif
