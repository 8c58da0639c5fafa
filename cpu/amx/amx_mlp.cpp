#include "amx_mlp.h"

#if defined(__x86_64__)

#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "../scratch.h"
#include "amx_blocks.h"

namespace fused_mlp::amx {

using torch::stable::Tensor;

void run(const Tensor& x, int64_t x_stride, int64_t tokens, const Layer& hidden, const Layer* down, const Tensor& out,
         const Kept& kept) {
  const Blocks blocks(tokens, down == nullptr ? hidden.panels() : std::min(hidden.panels(), down->panels()));
  const int64_t longest = blocks.longest();
  const int64_t in_size = packed_size(longest, hidden.in_features);
  const int64_t hidden_size = down == nullptr ? 0 : packed_size(longest, hidden.out_features);
  const int64_t sums_size = std::max(scratch_size(hidden, longest), down == nullptr ? 0 : scratch_size(*down, longest));
  const int64_t sums_at = blocks.slots() * (in_size + hidden_size) * 2;
  const Scratch workspace(sums_at + blocks.threads() * sums_size * 4);
  uint16_t* const packed_in = workspace.at<uint16_t>(0);
  uint16_t* const packed_hidden = packed_in + blocks.slots() * in_size;
  float* const sums = workspace.at<float>(sums_at);

  const uint16_t* const x_data = static_cast<const uint16_t*>(x.const_data_ptr());
  uint16_t* const out_data = static_cast<uint16_t*>(out.mutable_data_ptr());
  const int64_t out_features = out.size(1);

  const auto pack = [&](const Block& block) {
    pack_tokens(x_data + block.begin * x_stride, x_stride, block.tokens, hidden.in_features,
                packed_in + block.slot * in_size);
  };
  const auto rows_of_out = [&](const Block& block) {
    return Destination{out_data + block.begin * out_features, out_features};
  };
  const auto first_layer = [&](const Block& block, const Share& share) {
    Destination to = down == nullptr ? rows_of_out(block) : Destination{packed_hidden + block.slot * hidden_size, 0};
    if (kept.gate != nullptr) {
      const int64_t begin = block.begin * kept.row_stride;
      to.kept = {kept.gate + begin, hidden.gated ? kept.up + begin : nullptr, kept.row_stride};
    }
    project(hidden, packed_in + block.slot * in_size, block.tokens, share.begin(hidden), share.end(hidden),
            sums + share.thread * sums_size, to);
  };
  const auto second_layer = [&](const Block& block, const Share& share) {
    if (down == nullptr) return;
    project(*down, packed_hidden + block.slot * hidden_size, block.tokens, share.begin(*down), share.end(*down),
            sums + share.thread * sums_size, rows_of_out(block));
  };
  blocks.run(pack, first_layer, second_layer);
}

}  // namespace fused_mlp::amx

#endif
