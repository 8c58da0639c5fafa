#include "grouped_plan.h"

#include <algorithm>

#include "../../gemm/choice/usual.h"
#include "../plan/time_model.h"

namespace fused_mlp::sm80 {

namespace {

struct GroupedKernel {
  MainLoop loop;
  bool transposed;
  int rows;  // of a tile
};

// The kernels of grouped.def for a gated product; plain products have equally many.
constexpr GroupedKernel kGrouped[] = {
#define FUSED_MLP_GROUPED_STREAMED(PRODUCT, ROWS, ...) {MainLoop::kStreamed, false, ROWS},
#define FUSED_MLP_GROUPED_TILED(PRODUCT, TRANSPOSED, ROWS, ...) {MainLoop::kTiled, TRANSPOSED, ROWS},
#include "grouped.def"
};

// The kernel whose tiles hold the usual rows of an expert, and are no larger than needed; the largest if there are more
// rows. With few rows the time is that of reading the weights, once per tile.
GroupedKernel kernel_for(const Routes& routes, bool transposed) {
  const GroupedKernel* best = nullptr;
  const int64_t rows = usual_rows(routes);
  for (const GroupedKernel& each : kGrouped) {
    if (each.transposed != transposed && each.loop == MainLoop::kTiled) continue;
    if (transposed && each.loop == MainLoop::kStreamed) continue;
    const bool sorted = routes.slots() > kSearchedSlots;
    if (sorted && each.rows < kFittedStep) continue;  // a fitted tile has whole steps
    const bool better =
        best == nullptr || (best->rows < rows ? each.rows > best->rows : each.rows >= rows && each.rows < best->rows);
    if (better) best = &each;
  }
  return *best;
}

double products(const GroupedProblem& p) { return p.gemm.gated() ? 2.0 : 1.0; }

// The work of a layer, for the number of experts that are usually chosen.
struct Work {
  double flops, weight_bytes, row_bytes;

  explicit Work(const GroupedProblem& p)
      : flops(2.0 * products(p) * p.gemm.n * p.gemm.k * p.routes.slots()),
        weight_bytes(2.0 * products(p) * p.gemm.n * p.gemm.k * usual_experts(p.routes)),
        row_bytes(2.0 * p.routes.slots() * static_cast<double>(p.gemm.n + p.gemm.k)) {}
};

constexpr int kTile = 2;  // the index in Tuning::of_peak of tiles of 128 x 128

double layer_microseconds(const GroupedProblem& p, bool streams, const Gpu& gpu) {
  const Tuning& tuning = tuning_of(gpu);
  const Work work(p);
  const double share = streams ? tuning.share_of_bandwidth : kTiledShareOfBandwidth;
  // In an expert's last tile, half a step of rows is empty on average.
  const double filled = p.routes.slots() + usual_experts(p.routes) * (kFittedStep / 2.0);
  const double arithmetic = work.flops * filled / p.routes.slots() /
                            (flops_per_microsecond(gpu) * gpu.multiprocessors * tuning.of_peak[kTile]);
  return tuning.start +
         std::max(arithmetic, (work.weight_bytes + work.row_bytes) / (share * gpu.bytes_per_microsecond));
}

double layer_microseconds(const GroupedProblem& p, const Gpu& gpu) {
  return layer_microseconds(p, kernel_for(p.routes, p.transposed).loop == MainLoop::kStreamed, gpu);
}
double tiled_layer_microseconds(const GroupedProblem& p, const Gpu& gpu) { return layer_microseconds(p, false, gpu); }

constexpr double kCall = 5.0;         // microseconds of the CPU for an operation of torch, for which the GPU waits
constexpr double kRoutingCalls = 12;  // operations that sort the slots, before the CPU knows the rows of each expert

double torch_layer_microseconds(const GroupedProblem& p, const Gpu& gpu) {
  const Tuning& tuning = tuning_of(gpu);
  const Work work(p);
  const double experts = static_cast<double>(usual_experts(p.routes));
  const double arithmetic = work.flops / (flops_per_microsecond(gpu) * gpu.multiprocessors * tuning.torch_of_peak);
  const double bytes =
      (work.weight_bytes + work.row_bytes) / (tuning.torch_share_of_bandwidth * gpu.bytes_per_microsecond);
  return experts * std::max(kCall, tuning.torch_start + std::max(arithmetic, bytes) / experts);
}

// Kernels between and after the products, by the matrices of slots that they move.
double moving_microseconds(double elements, double kernels, const Gpu& gpu) {
  const Tuning& tuning = tuning_of(gpu);
  return kernels * tuning.torch_start + 2.0 * elements / (tuning.torch_share_of_bandwidth * gpu.bytes_per_microsecond);
}

}  // namespace

GroupedPlan plan_grouped(const GroupedProblem& p, const Gpu&) {
  const GroupedKernel kernel = kernel_for(p.routes, p.transposed);
  const bool sorts = kernel.loop == MainLoop::kTiled || p.routes.slots() > kSearchedSlots;
  GroupedPlan plan{kernel.loop, sorts, kernel.rows, row_tiles(p.routes, kernel.rows), 1};
  plan.sorted_rows = row_tiles(p.routes, kFittedStep) * kFittedStep;
  plan.fits = sorts;
  plan.gathers = sorts;
  return plan;
}

double experts_microseconds(const GroupedProblem& first, const GroupedProblem& second, const Gpu& gpu) {
  const double slots = first.routes.slots();
  const double sorting = slots > kSearchedSlots ? moving_microseconds(0.0, 2.0, gpu) : 0.0;
  return sorting + layer_microseconds(first, gpu) + layer_microseconds(second, gpu) +
         moving_microseconds(slots * second.gemm.n, 1.0, gpu);
}

// Rows are copied and sorted, gate and up are read for the hidden values, results are ordered, weighted and added up.
double torch_experts_microseconds(const GroupedProblem& first, const GroupedProblem& second, const Gpu& gpu) {
  const double slots = first.routes.slots(), hidden = static_cast<double>(first.gemm.n);
  const double elements = slots * (2.0 * first.gemm.k + (products(first) + 1.0) * hidden + 6.0 * second.gemm.n);
  return kRoutingCalls * kCall + torch_layer_microseconds(first, gpu) + torch_layer_microseconds(second, gpu) +
         moving_microseconds(elements, 8.0, gpu);
}

namespace {

Refusal decide(double ours, double torch, const Gpu& gpu) {
  const Tuning& tuning = tuning_of(gpu);
  if (ours * tuning.margin() <= torch) return Refusal::kNone;
  return tuning.measured() ? Refusal::kTorchIsFaster : Refusal::kTorchByModel;
}

}  // namespace

Refusal decide_experts(const GroupedProblem& first, const GroupedProblem& second, const Gpu& gpu) {
  return decide(experts_microseconds(first, second, gpu), torch_experts_microseconds(first, second, gpu), gpu);
}

GroupedPlan plan_trained_experts(const Routes& routes) {
  const int tiles = row_tiles(routes, kTiledBlock);
  return {MainLoop::kTiled, true, kTiledBlock, tiles, 1, tiles * kTiledBlock, true};
}

namespace {

// A forward and its backward: every layer has three products of equal work, two of which read a transposed side.
constexpr double kTrainedProducts = 1.0 + 2.0 / kLyingShare;

}  // namespace

// Rows are sorted twice and results added up twice; the gate is one kernel in each direction, on gates, ups and hidden
// values.
double trained_experts_microseconds(const GroupedProblem& first, const GroupedProblem& second, const Gpu& gpu) {
  const double slots = first.routes.slots(), hidden = static_cast<double>(second.gemm.k);
  const double gates = 2.0 * hidden + hidden + 4.0 * hidden + 2.0 * hidden;
  return kTrainedProducts * (tiled_layer_microseconds(first, gpu) + tiled_layer_microseconds(second, gpu)) +
         moving_microseconds(slots * (gates + 6.0 * second.gemm.n), 8.0, gpu);
}

// The forward's kernels, and for the backward two products per expert and layer, and twice as much between them.
double torch_trained_experts_microseconds(const GroupedProblem& first, const GroupedProblem& second, const Gpu& gpu) {
  const double layers = torch_layer_microseconds(first, gpu) + torch_layer_microseconds(second, gpu);
  const double forward = torch_experts_microseconds(first, second, gpu);
  const double moving = forward - layers - kRoutingCalls * kCall;
  return forward + 2.0 * (layers + moving);
}

Refusal decide_trained_experts(const GroupedProblem& first, const GroupedProblem& second, const Gpu& gpu) {
  return decide(trained_experts_microseconds(first, second, gpu),
                torch_trained_experts_microseconds(first, second, gpu), gpu);
}

}  // namespace fused_mlp::sm80
