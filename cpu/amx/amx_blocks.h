#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>

#include "../../torch-ext/operands/matrix.h"
#include "amx_gemm.h"

namespace fused_mlp::amx {

// Tokens that go through a layer together. `slot` selects their memory, so that blocks processed at the same time do
// not share it.
struct Block {
  int64_t begin, tokens, slot;
};

// A thread's share of the panels of a block's layer.
struct Share {
  int64_t thread, index, count;

  // The panels [begin, end) of a layer.
  int64_t begin(const Layer& layer) const { return layer.panels() * index / count; }
  int64_t end(const Layer& layer) const { return layer.panels() * (index + 1) / count; }
};

// The division of tokens among threads. If there is a whole block for each thread, a thread takes its blocks through
// all stages. Otherwise all threads share the panels of every block, one stage after the other.
class Blocks {
 public:
  // `panels`: the number of panels of the layer that has the fewest. Layers with fewer panels than threads are not
  // shared.
  Blocks(int64_t tokens, int64_t panels) : tokens_(tokens), threads_(torch::stable::get_num_threads()) {
    const int64_t groups = ceil_div(tokens, kTokens);
    whole_ = ceil_div(groups, kGroups) >= threads_ || panels < threads_;
    longest_ = std::min(kGroups, ceil_div(groups, whole_ ? threads_ : 1)) * kTokens;
    slots_ = whole_ ? threads_ : ceil_div(groups, kGroups);
  }

  int64_t threads() const { return threads_; }
  int64_t slots() const { return slots_; }
  // True if each block has its own slot.
  bool holds_all() const { return !whole_ || ceil_div(ceil_div(ceil_div(tokens_, kTokens), threads_), kGroups) <= 1; }
  // The number of tokens of the longest block.
  int64_t longest() const { return longest_; }

  // Calls pack(block), then each stage(block, share).
  template <typename Pack, typename... Stages>
  void run(const Pack& pack, const Stages&... stages) const {
    const int64_t groups = ceil_div(tokens_, kTokens);
    if (whole_) {
      return for_each_thread([&](int64_t thread) {
        const int64_t begin = groups * thread / threads_, end = groups * (thread + 1) / threads_;
        const int64_t count = ceil_div(end - begin, kGroups);
        for (int64_t b = 0; b < count; ++b) {
          const Block block = part(begin, end - begin, b, count, thread);
          pack(block);
          (stages(block, Share{thread, 0, 1}), ...);
        }
      });
    }
    const auto block = [&](int64_t b) { return part(0, groups, b, slots_, b); };
    torch::stable::parallel_for(0, slots_, 1, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) pack(block(b));
    });
    const auto share = [&](const auto& stage) {
      for_each_thread([&](int64_t thread) {
        for (int64_t b = 0; b < slots_; ++b) stage(block(b), Share{thread, thread, threads_});
      });
    };
    (share(stages), ...);
  }

 private:
  // The maximum number of groups of kTokens tokens in a block: enough to make a pass over the weights cheap, few enough
  // for a chunk of their features to stay in L2.
  static constexpr int64_t kGroups = 8;

  // One of `count` parts of nearly equal length, of some groups.
  Block part(int64_t begin, int64_t groups, int64_t index, int64_t count, int64_t slot) const {
    const int64_t first = (begin + groups * index / count) * kTokens;
    const int64_t last = (begin + groups * (index + 1) / count) * kTokens;
    return {first, std::min(last, tokens_) - first, slot};
  }

  template <typename Body>
  void for_each_thread(const Body& body) const {
    torch::stable::parallel_for(0, threads_, 1, [&](int64_t begin, int64_t end) {
      for (int64_t thread = begin; thread < end; ++thread) body(thread);
    });
  }

  int64_t tokens_, threads_, longest_, slots_;
  bool whole_;
};

}  // namespace fused_mlp::amx
