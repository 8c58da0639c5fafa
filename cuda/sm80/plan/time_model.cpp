#include "time_model.h"

#include <algorithm>
#include <iterator>

namespace fused_mlp::sm80 {
namespace {

double products(const GemmProblem& p) { return p.gated() || p.pair() ? 2.0 : 1.0; }

// The bytes of the operands, and those that the epilogue reads and writes.
double bytes(const GemmProblem& p, int matrices) {
  const double left = p.pair() ? 2.0 : 1.0;
  return 2.0 * (p.m * (left * p.k + static_cast<double>(matrices) * p.n) + products(p) * p.n * p.k);
}
double bytes(const GemmProblem& p) { return bytes(p, moved_matrices(p.product())); }

// Operations per cycle of a multiprocessor's tensor cores, on 16-bit elements with sums in float32.
double flops_per_cycle(const Gpu& gpu) {
  if (gpu.major == 9) return 2400.0;  // by mma.sync, as measured from registers
  if (gpu.major == 8 && (gpu.minor == 0 || gpu.minor == 7)) return 2048.0;
  return gpu.geforce ? 512.0 : 1024.0;
}

// The bytes per microsecond that CTAs read: few CTAs cannot use the whole bandwidth.
double bandwidth(double share, int64_t ctas, const Gpu& gpu) {
  const double reach = std::min(1.0, kLeastReach + ctas / (kBusyCtas * gpu.multiprocessors));
  return share * reach * gpu.bytes_per_microsecond;
}

double share_of_peak(const GemmKernel& kernel, const Tuning& tuning) {
  const auto tile = std::find_if(std::begin(kTiles), std::end(kTiles), [&](const int (&each)[2]) {
    return each[0] == kernel.block_m && each[1] == kernel.block_n;
  });
  return tuning.of_peak[tile - std::begin(kTiles)];
}

double tiled_microseconds(const GemmProblem& p, const ListedKernel& listed, const Gpu& gpu) {
  const GemmKernel& kernel = listed.kernel;
  const Tuning& tuning = tuning_of(gpu);
  const double depth =
      static_cast<double>(ceil_div(p.k, listed.shape.block_k)) * listed.shape.block_k * (p.pair() ? 2.0 : 1.0);
  const double tile =
      2.0 * kernel.block_m * kernel.block_n * depth / flops_per_microsecond(gpu) / share_of_peak(kernel, tuning);
  // Tiles that run on the same multiprocessor share its tensor cores. In the last round there may be fewer of them.
  const int64_t tiles = ceil_div(p.m, kernel.block_m) * ceil_div(p.n, kernel.columns());
  const int64_t side_by_side =
      std::max<int64_t>(1, std::min(2, resident_ctas(listed.shared_bytes, gpu.shared_of_multiprocessor)));
  const int64_t round = side_by_side * gpu.multiprocessors;
  const int64_t rounds = tiles / round;
  double arithmetic = (rounds * side_by_side + ceil_div(tiles - rounds * round, gpu.multiprocessors)) * tile;
  if (reads_weights_as_they_lie(p.product())) arithmetic /= kLyingShare;
  double epilogue = 0.0;
  if (is_gradient(p.product())) {
    epilogue = (bytes(p) - bytes(p, 0)) / bandwidth(kGradientShareOfBandwidth, tiles, gpu);
  }
  return tuning.start + std::max(arithmetic, bytes(p) / bandwidth(kTiledShareOfBandwidth, tiles, gpu)) + epilogue;
}

double streamed_microseconds(const GemmProblem& p, const ListedKernel& listed, const Gpu& gpu) {
  const Tuning& tuning = tuning_of(gpu);
  const int64_t tiles = ceil_div(p.m, listed.kernel.block_m) * ceil_div(p.n, listed.kernel.columns());
  // Every tile reads its weight rows and its tokens through L2.
  const double through_l2 = 2.0 * static_cast<double>(tiles) * p.k * (listed.shape.rows_m + listed.shape.rows_n);
  const double busy = static_cast<double>(std::min<int64_t>(tiles, gpu.multiprocessors)) / gpu.multiprocessors;
  const double from_l2 = through_l2 / (busy * gpu.multiprocessors * kL2BytesPerCycle * gpu.cycles_per_microsecond);
  // In the last round some multiprocessors have no tile, and the others can read faster only to a limited degree.
  const int64_t ctas = gpu.multiprocessors * streamed_ctas(listed.shape, gpu.shared_of_multiprocessor);
  const double idle = std::max(1.0, static_cast<double>(ceil_div(tiles, ctas) * ctas) / tiles);
  const double rounds = tiles > ctas ? (1.0 + idle) / 2.0 : 1.0;
  const double reach = std::min(1.0, kSoloReach * busy);
  const double from_memory = rounds * bytes(p) / (tuning.share_of_bandwidth * reach * gpu.bytes_per_microsecond);
  return tuning.start + std::max(from_l2, from_memory) + 0.1 * std::min(from_l2, from_memory);
}

// torch applies tanh-GELU in its GEMM if there is a bias: cuda/dense/torch/torch_layer.h.
bool torch_has_epilogue(const GemmProblem& p) {
  return p.linear() || (!p.gated() && p.epilogue.bias != nullptr &&
                        p.epilogue.activation == static_cast<int64_t>(Activation::kGeluTanh));
}

}  // namespace

double flops_per_microsecond(const Gpu& gpu) { return flops_per_cycle(gpu) * gpu.cycles_per_microsecond; }

const Tuning& tuning_of(const Gpu& gpu) {
  const auto* last = std::end(kTunings) - 1;
  return *std::find_if(std::begin(kTunings), last,
                       [&](const Tuning& each) { return each.major == gpu.major && each.minor == gpu.minor; });
}

double estimated_microseconds(const GemmProblem& p, const ListedKernel& kernel, const Gpu& gpu) {
  return kernel.kernel.loop == MainLoop::kTiled ? tiled_microseconds(p, kernel, gpu)
                                                : streamed_microseconds(p, kernel, gpu);
}

double torch_microseconds(const GemmProblem& p, const Gpu& gpu) {
  const Tuning& tuning = tuning_of(gpu);
  const double bytes_per_microsecond = tuning.torch_share_of_bandwidth * gpu.bytes_per_microsecond;
  const double elements = static_cast<double>(p.m) * p.n;
  const double arithmetic = 2.0 * products(p) * elements * p.k / (flops_per_microsecond(gpu) * gpu.multiprocessors);
  // The results of two products: the second of a pair reads the first's, and overwrites it.
  const double moved = bytes(p, p.pair() ? 3 : p.gated() ? 2 : 1);
  const double gemms = std::max(arithmetic / tuning.torch_of_peak, moved / bytes_per_microsecond);
  const double starts = products(p) * tuning.torch_start;
  if (p.pair() || (!is_training(p.product()) && torch_has_epilogue(p))) return gemms + starts;
  const double matrices = is_training(p.product()) ? composed_matrices(p.product()) : products(p) + 1.0;
  const double pointwise = 2.0 * elements * matrices;
  const double in_l2 = std::min(pointwise, gpu.l2_bytes / 2.0);
  const double slow = pointwise - in_l2 + in_l2 / kL2Speedup;
  const double kernels = is_gradient(p.product()) ? 2.0 : 1.0;  // after the products
  return gemms + starts + kernels * tuning.torch_start + slow / bytes_per_microsecond;
}

}  // namespace fused_mlp::sm80
