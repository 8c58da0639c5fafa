// The constants for the choice of kernels for training, like those of tuning.h for the others. Set by hand, from times
// on an H200: k_block is that of the forward kernel with such a tile. round is the time that the epilogue adds if k is
// short, because it moves more data. With a long k it is hidden, which these constants do not model.
#pragma once

#include "time_model.h"

namespace fused_mlp::sm90 {

// clang-format off
constexpr TunedKernel kTrainingTimes[] = {
    {{MainLoop::kTiled, Product::kGatedKept, 128, 128, Schedule::kPingPong, 1}, {2.3, 0.4, 0.354, 0.0}},
    {{MainLoop::kTiled, Product::kPlainKept, 128, 128, Schedule::kPingPong, 1}, {2.3, 0.9, 0.354, 0.0}},
    {{MainLoop::kTiled, Product::kGatedGradient, 128, 192, Schedule::kPingPong, 1}, {2.3, 5.5, 0.476, 0.0}},
    {{MainLoop::kTiled, Product::kGatedGradient, 128, 128, Schedule::kPingPong, 1}, {2.3, 4.0, 0.354, 0.0}},
    {{MainLoop::kTiled, Product::kPlainGradient, 128, 128, Schedule::kPingPong, 1}, {2.3, 2.0, 0.354, 0.0}},
    {{MainLoop::kTiled, Product::kPair, 128, 128, Schedule::kPingPong, 1}, {2.3, 0.0, 0.354, 0.0}},
};
// clang-format on

}  // namespace fused_mlp::sm90
