// The constants by which the kernels of training are chosen, as tuning.h has those of the others. A product's main loop
// takes as long as that of the forward kernel with the same tiles; the rounds are longer by what the epilogue, which
// moves more, holds the other warpgroup up.
#pragma once

#include "time_model.h"

namespace fused_mlp::sm90 {

// clang-format off
constexpr TunedKernel kTrainingTimes[] = {
    {{MainLoop::kTiled, Product::kGatedKept, 128, 192, Schedule::kPingPong, 1}, {2.3, 1.0, 0.526, 0.0}},
    {{MainLoop::kTiled, Product::kGatedKept, 128, 160, Schedule::kPingPong, 1}, {2.3, 0.9, 0.441, 0.0}},
    {{MainLoop::kTiled, Product::kGatedKept, 128, 128, Schedule::kPingPong, 1}, {2.3, 0.8, 0.354, 0.0}},
    {{MainLoop::kTiled, Product::kPlainKept, 128, 128, Schedule::kPingPong, 1}, {2.3, 1.0, 0.354, 0.0}},
    {{MainLoop::kTiled, Product::kGatedGradient, 128, 192, Schedule::kPingPong, 1}, {2.3, 7.0, 0.476, 0.0}},
    {{MainLoop::kTiled, Product::kGatedGradient, 128, 128, Schedule::kPingPong, 1}, {2.3, 5.5, 0.354, 0.0}},
    {{MainLoop::kTiled, Product::kPlainGradient, 128, 128, Schedule::kPingPong, 1}, {2.3, 4.0, 0.354, 0.0}},
    {{MainLoop::kTiled, Product::kPair, 128, 256, Schedule::kCooperative, 1}, {2.3, 3.0, 0.65, 0.0}},
    {{MainLoop::kTiled, Product::kPair, 128, 192, Schedule::kPingPong, 1}, {2.3, 0.0, 0.5, 0.0}},
    {{MainLoop::kTiled, Product::kPair, 128, 128, Schedule::kPingPong, 1}, {2.3, 0.0, 0.354, 0.0}},
    {{MainLoop::kTiled, Product::kPair, 128, 128, Schedule::kCooperative, 2}, {0.0, 3.75, 0.387, 0.0}},
};
// clang-format on

}  // namespace fused_mlp::sm90
