#include <algorithm>

#include "../launch.cuh"
#include "joint.h"
#include "joint_gemm.cuh"

namespace fused_mlp::sm90 {
namespace {

constexpr int kWide = 192, kNarrow = 128;  // weight rows in a tile

// By the constants of training_times.h.
double microseconds(const JointLayers& p, int block_n, int multiprocessors) {
  constexpr double kStart = 2.3, kWideBlock = 0.476, kNarrowBlock = 0.354;
  int64_t tiles_n = 0;
  for (const JointLayer& layer : p.layers) tiles_n += ceil_div(layer.n, block_n);
  const int64_t rounds = ceil_div(ceil_div(p.m, 128) * tiles_n, multiprocessors);
  return kStart + rounds * ceil_div(p.k, kBlockK) * (block_n == kWide ? kWideBlock : kNarrowBlock);
}

int faster_width(const JointLayers& p, int multiprocessors) {
  return microseconds(p, kWide, multiprocessors) < microseconds(p, kNarrow, multiprocessors) ? kWide : kNarrow;
}

template <typename Gemm>
cudaError_t launch_tiles(const JointLayers& p, int multiprocessors, cudaStream_t stream) {
  JointGemmArgs args;
  const int box_rows_a = static_cast<int>(std::min<int64_t>(p.m, Gemm::kBlockM));
  bool mapped = encode_tensor_map(&args.a, p.dtype, p.a, p.m, p.k, box_rows_a, Gemm::kBlockK);
  args.k_blocks = args.own_blocks = static_cast<int>(ceil_div(p.k, Gemm::kBlockK));
  args.last_row = static_cast<int>(std::max<int64_t>(p.m - Gemm::kBlockM, 0));
  args.stage_bytes = box_rows_a * Gemm::kBlockK * sizeof(typename Gemm::Element) + Gemm::kBytesB;
  args.tiles_m = static_cast<int>(ceil_div(p.m, Gemm::kBlockM));
  args.starts_early = false;
  args.all_tiles_n = 0;
  const void* any_bias = nullptr;
  for (size_t i = 0; i < p.layers.size(); ++i) {
    const JointLayer& layer = p.layers[i];
    TiledGemmArgs& of = i == 0 ? args : args.others[i - 1];
    of.tiles_n = static_cast<int>(ceil_div(layer.n, Gemm::kTileN));
    args.all_tiles_n += of.tiles_n;
    if (layer.n == 0) continue;
    mapped = mapped &&
             encode_tensor_map(&of.weight, p.dtype, layer.weight, layer.n, p.k, Gemm::kBoxRowsB, Gemm::kBlockK) &&
             encode_tensor_map(&of.out, p.dtype, Matrix{layer.out, layer.n}, p.m, layer.n, Gemm::kBoxRows, Gemm::kBoxN);
    of.epilogue = {layer.bias, nullptr, static_cast<int64_t>(Activation::kLinear)};
    of.n = static_cast<int>(layer.n);
    of.last_column = static_cast<int>(std::max<int64_t>(layer.n - Gemm::kTileN, 0));
    if (layer.bias != nullptr) any_bias = layer.bias;
  }
  if (!mapped) return cudaErrorInvalidValue;
  args.epilogue.up_bias = any_bias;  // says that some tile has one, and is not read
  constexpr auto kKernel = tiled_gemm_kernel<Gemm>;
  const cudaError_t error = allow_shared_memory<kKernel>(Gemm::kSharedBytes);
  if (error != cudaSuccess) return error;
  const int ctas = std::min(args.tiles_m * args.all_tiles_n, multiprocessors);
  return launch_kernel(kKernel, args, ctas, Gemm::kThreads, Gemm::kSharedBytes, 1, false, stream);
}

template <typename Element>
cudaError_t launch(const JointLayers& p, int multiprocessors, cudaStream_t stream) {
  return faster_width(p, multiprocessors) == kWide
             ? launch_tiles<JointTiles<Element, kWide>>(p, multiprocessors, stream)
             : launch_tiles<JointTiles<Element, kNarrow>>(p, multiprocessors, stream);
}

}  // namespace

bool takes_joint(const JointLayers& p, const Gpu& gpu) {
  // What torch's products reach (measured on an H200), and what each of them takes besides. Long ones, and those of few
  // rows, were not measured.
  constexpr int64_t kLeastRows = 512;
  constexpr double kTorchRate = 650e6, kStart = 2.0, kLongMicroseconds = 100.0;
  constexpr int64_t kMost = int64_t{1} << kColumnBits;
  const auto in_lines = [](const Matrix& rows) {
    return reinterpret_cast<uintptr_t>(rows.data) % 128 == 0 && rows.row_stride % 64 == 0;
  };
  if (p.dtype == DType::kFloat32 || p.m < kLeastRows || p.m > kMost || p.k == 0 || p.k > kMost || !in_lines(p.a)) {
    return false;
  }
  double torch = 0.0;
  for (const JointLayer& layer : p.layers) {
    if (layer.n == 0) continue;
    const bool biased = reinterpret_cast<uintptr_t>(layer.bias) % 2 == 0;
    if (layer.n % 8 != 0 || layer.n >= kMost || !in_lines(layer.weight) || !biased) return false;
    torch += kStart + 2.0 * p.m * layer.n * p.k / kTorchRate;
  }
  const double ours = microseconds(p, faster_width(p, gpu.multiprocessors), gpu.multiprocessors);
  return ours <= kLongMicroseconds && ours <= torch;
}

cudaError_t launch_joint(const JointLayers& p, const Gpu& gpu, cudaStream_t stream) {
  return p.dtype == DType::kFloat16 ? launch<__half>(p, gpu.multiprocessors, stream)
                                    : launch<__nv_bfloat16>(p, gpu.multiprocessors, stream);
}

}  // namespace fused_mlp::sm90
