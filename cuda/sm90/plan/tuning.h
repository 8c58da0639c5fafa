// The constants by which the sm_90a GEMMs are chosen, made by `make tune` on NVIDIA H100 80GB HBM3. Those of streamed
// kernels are fitted with other weights at each call. Up to 32 rows sm_80's kernels are there to choose from too: gated
// and activated products are fitted together with cuda/sm80/beside_sm90.cpp, to 2821 products on an H100 and an H200.
// From 33 to 64 rows those of gated and plain products are fitted to 325 products of usual and of random sizes on an
// H100 and 500 on an H200, and those of activated ones to products on an H100 alone. Those of tiled kernels are fitted
// to products on an H100 and an H200, but for gated tiles of 112, 144, 176 and 208 rows, which lie between their
// neighbours'. Those of products with one weight, of streamed kernels from 65 rows on and of torch's GEMM are fitted to
// 1072 products of 33 to 4096 rows and random sizes on an H100 and 1422 on an H200. time_model.h says what they mean,
// tools/tuning/fit.py how they are fitted.
#pragma once

#include "time_model.h"

namespace fused_mlp::sm90 {

// clang-format off
constexpr TunedKernel kTuned[] = {
    {{MainLoop::kTiled, Product::kGated, 128, 192, Schedule::kPingPong, 1}, {2.309, 0.0, 0.526, 0.0}},
    {{MainLoop::kTiled, Product::kGated, 128, 176, Schedule::kPingPong, 1}, {2.583, 0.0, 0.486, 0.0}},
    {{MainLoop::kTiled, Product::kGated, 128, 160, Schedule::kPingPong, 1}, {2.406, 0.0, 0.441, 0.0}},
    {{MainLoop::kTiled, Product::kGated, 128, 144, Schedule::kPingPong, 1}, {2.585, 0.0, 0.401, 0.0}},
    {{MainLoop::kTiled, Product::kGated, 128, 128, Schedule::kPingPong, 1}, {1.99, 0.0, 0.354, 0.0}},
    {{MainLoop::kTiled, Product::kGated, 128, 224, Schedule::kCooperative, 1}, {1.331, 0.315, 0.663, 0.0}},
    {{MainLoop::kTiled, Product::kGated, 128, 128, Schedule::kCooperative, 1}, {0.824, 0.998, 0.356, 0.0}},
    {{MainLoop::kTiled, Product::kGated, 144, 256, Schedule::kSwapped, 1}, {0.511, 1.132, 0.866, 0.0}},
    {{MainLoop::kTiled, Product::kGated, 64, 128, Schedule::kSwappedHalfRows, 1}, {1.331, 0.529, 0.248, 0.0}},
    {{MainLoop::kTiled, Product::kGated, 96, 128, Schedule::kSwappedHalfRows, 1}, {0.831, 0.695, 0.311, 0.0}},
    {{MainLoop::kTiled, Product::kGated, 112, 128, Schedule::kSwappedHalfRows, 1}, {0.75, 0.81, 0.343, 0.0}},
    {{MainLoop::kTiled, Product::kGated, 144, 128, Schedule::kSwappedHalfRows, 1}, {0.6, 1.05, 0.421, 0.0}},
    {{MainLoop::kTiled, Product::kGated, 160, 128, Schedule::kSwappedHalfRows, 1}, {0.529, 1.172, 0.459, 0.0}},
    {{MainLoop::kTiled, Product::kGated, 176, 128, Schedule::kSwappedHalfRows, 1}, {0.396, 1.335, 0.505, 0.0}},
    {{MainLoop::kTiled, Product::kGated, 208, 128, Schedule::kSwappedHalfRows, 1}, {0.13, 1.66, 0.596, 0.0}},
    {{MainLoop::kTiled, Product::kGated, 224, 128, Schedule::kSwappedHalfRows, 1}, {0.0, 1.823, 0.641, 0.0}},
    {{MainLoop::kTiled, Product::kPlain, 128, 192, Schedule::kPingPong, 1}, {3.46, 0.0, 0.498, 1.628}},
    {{MainLoop::kTiled, Product::kPlain, 128, 160, Schedule::kPingPong, 1}, {3.823, 0.0, 0.418, 1.062}},
    {{MainLoop::kTiled, Product::kPlain, 128, 144, Schedule::kPingPong, 1}, {3.754, 0.0, 0.377, 1.204}},
    {{MainLoop::kTiled, Product::kPlain, 128, 128, Schedule::kPingPong, 1}, {2.103, 0.0, 0.34, 1.321}},
    {{MainLoop::kTiled, Product::kPlain, 48, 128, Schedule::kSwapped, 1}, {1.919, 0.104, 0.172, 1.198}},
    {{MainLoop::kTiled, Product::kPlain, 64, 128, Schedule::kSwapped, 1}, {1.796, 0.3, 0.178, 1.489}},
    {{MainLoop::kTiled, Product::kPlain, 80, 128, Schedule::kSwapped, 1}, {1.266, 0.506, 0.218, 1.417}},
    {{MainLoop::kTiled, Product::kPlain, 96, 128, Schedule::kSwapped, 1}, {1.112, 0.861, 0.266, 1.738}},
    {{MainLoop::kTiled, Product::kPlain, 112, 128, Schedule::kSwapped, 1}, {1.183, 1.054, 0.291, 1.552}},
    {{MainLoop::kTiled, Product::kPlain, 160, 128, Schedule::kSwapped, 1}, {1.156, 0.915, 0.438, 1.703}},
    {{MainLoop::kTiled, Product::kPlain, 208, 128, Schedule::kSwapped, 1}, {1.306, 0.732, 0.566, 1.591}},
    {{MainLoop::kTiled, Product::kPlain, 64, 128, Schedule::kSwapped, 4}, {1.645, 3.142, 0.18, 0.097}},
    {{MainLoop::kTiled, Product::kPlain, 96, 128, Schedule::kSwapped, 4}, {0.882, 4.603, 0.208, 0.166}},
    {{MainLoop::kTiled, Product::kPlain, 128, 128, Schedule::kSwapped, 4}, {0.517, 5.032, 0.298, 0.266}},
};
constexpr StreamedTime kStreamedFewGated = {2.96613, 0.57606, 0.28697, 0.77976, 0.03203, 0.01024, 0.13069, 0.00031, 0.00016, 0.0004, 0.00456, 0.00023};
constexpr StreamedTime kStreamedFewActivated = {2.01352, 0.11018, 0.51091, 0.77795, 0.00638, 0.0072, 0.1328, 0.00182, 0.00023, 0.00003, 0.00098, 0.00028};
constexpr StreamedTime kStreamedFewPlain = {2.69994, 0.0, 1.1491, 0.75752, 0.00816, 0.00245, 0.15754, 0.0, 0.00042, 0.00014, 0.08728, 0.0};
constexpr StreamedTime kStreamedGated = {0.5549, 1.85711, 1.16338, 1.56659, 0.01419, 0.04797, 0.08047, 0.00368, 0.00034, 0.00025, 0.02152, 0.00013};
constexpr StreamedTime kStreamedActivated = {2.54891, 0.02855, 0.22563, 1.05952, 0.07059, 0.09108, 0.16486, 0.00033, 0.0002, 0.0004, 0.0927, 0.00028};
constexpr StreamedTime kStreamedPlain = {2.45653, 0.7178, 0.56734, 0.07883, 0.03157, 0.29705, 0.09028, 0.00026, 0.00015, 0.00116, 0.00464, 0.00021};
constexpr StreamedTime kStreamedTall = {3.96741, 0.81253, 0.02311, 2.23184, 0.98437, 3.55683, 0.20308, 2e-05, 0.0, 5e-05, 0.16909, 0.0};

constexpr MeasuredOn kMeasuredOn = {132, 1980.0, 3352320.0};
constexpr TorchTime kTorch = {3.2275, 0.8787, 0.096, 0.3937, 3.3529, 0.7909, 1.07};
constexpr Peak kPeak = {3.0e6, 750e6};
// clang-format on

}  // namespace fused_mlp::sm90
