#include "amx_mlp.h"

#if defined(__x86_64__)

#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "../torch-ext/matrix.h"

namespace fused_mlp::amx {

using torch::stable::parallel_for;
using torch::stable::Tensor;

namespace {

// Tokens that share one pass over the weights: enough for the pass to be cheap, few enough for a chunk of their
// features to stay in L2.
constexpr int64_t kBlockTokens = 256;

}  // namespace

void run(const Tensor& x, int64_t x_stride, int64_t tokens, const Layer& hidden, const Layer* down, const Tensor& out) {
  const int64_t threads = torch::stable::get_num_threads();
  // Where there are enough blocks, each thread takes whole blocks through both layers. Otherwise the threads share the
  // features of every block.
  const bool share_tokens = ceil_div(tokens, kBlockTokens) >= threads;
  const int64_t blocks_wanted = ceil_div(tokens, kBlockTokens);
  const int64_t block =
      round_up(ceil_div(tokens, share_tokens ? round_up(blocks_wanted, threads) : blocks_wanted), kTokens);
  const int64_t blocks = ceil_div(tokens, block);
  const int64_t slots = share_tokens ? threads : blocks;

  const int64_t in_size = packed_size(block, hidden.in_features);
  const int64_t hidden_size = down == nullptr ? 0 : packed_size(block, hidden.out_features);
  const int64_t sums_size = std::max(scratch_size(hidden, block), down == nullptr ? 0 : scratch_size(*down, block));
  const Tensor workspace = torch::stable::new_empty(x, {slots * (in_size + hidden_size) + threads * sums_size * 2});
  uint16_t* const packed_in = static_cast<uint16_t*>(workspace.mutable_data_ptr());
  uint16_t* const packed_hidden = packed_in + slots * in_size;
  float* const sums = reinterpret_cast<float*>(packed_hidden + slots * hidden_size);

  const uint16_t* const x_data = static_cast<const uint16_t*>(x.const_data_ptr());
  uint16_t* const out_data = static_cast<uint16_t*>(out.mutable_data_ptr());
  const int64_t out_features = out.size(1);

  const auto block_tokens = [&](int64_t b) { return std::min(block, tokens - b * block); };
  const auto pack = [&](int64_t b, int64_t slot) {
    pack_tokens(x_data + b * block * x_stride, x_stride, block_tokens(b), hidden.in_features,
                packed_in + slot * in_size);
  };
  // Each computes one layer for a block, or a share of the layer's panels.
  const auto first_layer = [&](int64_t b, int64_t slot, int64_t thread, int64_t share, int64_t shares) {
    const int64_t panels = hidden.panels();
    const Destination to = down == nullptr ? Destination{out_data + b * block * out_features, out_features}
                                           : Destination{packed_hidden + slot * hidden_size, 0};
    project(hidden, packed_in + slot * in_size, block_tokens(b), panels * share / shares, panels * (share + 1) / shares,
            sums + thread * sums_size, to);
  };
  const auto second_layer = [&](int64_t b, int64_t slot, int64_t thread, int64_t share, int64_t shares) {
    if (down == nullptr) return;
    const int64_t panels = down->panels();
    project(*down, packed_hidden + slot * hidden_size, block_tokens(b), panels * share / shares,
            panels * (share + 1) / shares, sums + thread * sums_size,
            {out_data + b * block * out_features, out_features});
  };
  const auto for_each_thread = [&](const auto& body) {
    parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t thread = begin; thread < end; ++thread) body(thread);
    });
  };

  if (share_tokens) {
    for_each_thread([&](int64_t thread) {
      for (int64_t b = blocks * thread / threads; b < blocks * (thread + 1) / threads; ++b) {
        pack(b, thread);
        first_layer(b, thread, thread, 0, 1);
        second_layer(b, thread, thread, 0, 1);
      }
    });
  } else {
    parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) pack(b, b);
    });
    for_each_thread([&](int64_t thread) {
      for (int64_t b = 0; b < blocks; ++b) first_layer(b, b, thread, thread, threads);
    });
    for_each_thread([&](int64_t thread) {
      for (int64_t b = 0; b < blocks; ++b) second_layer(b, b, thread, thread, threads);
    });
  }
}

}  // namespace fused_mlp::amx

#endif
