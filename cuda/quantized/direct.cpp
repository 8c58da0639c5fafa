// MLPs with quantised weights and their blocks without tensors, by kernels of this package.
#include "direct.h"

#include <array>
#include <optional>

#include "../norms/run_norm.h"
#include "coded_layer.h"
#include "scaled/rounded_rows.h"

namespace fused_mlp {
namespace {

// The weights of an MLP in order: gate, up, down.
class Weights {
 public:
  explicit Weights(const PlainMlp& mlp) {
    for (int i = 0; i < mlp.count; ++i) {
      for (const PackedWeight* weight : {mlp.layers[i].packed, mlp.layers[i].up_packed}) {
        if (weight != nullptr) all_[count_++] = weight;
      }
    }
  }
  std::span<const PackedWeight* const> span() const { return {all_.data(), count_}; }

 private:
  std::array<const PackedWeight*, kMostNested> all_{};
  size_t count_ = 0;
};

Part part_of(const PlainLayer& layer) {
  return {layer.packed, layer.up_packed, layer.bias, layer.up_bias, layer.activation};
}

// Launches the kernels of an MLP, one after the other.
struct Steps {
  PlainMlp mlp;
  const Gpu& gpu;
  cudaStream_t stream;
  CodedLayer first;
  std::optional<CodedLayer> second;

  void operator()(void* out) {
    const Weights weights(mlp);
    FloatScales scales(weights.span());
    scales.unnest(stream);
    std::optional<Scratch> normed;
    Matrix x = mlp.x;
    if (mlp.first.kind != NormKind::kNone) {
      x = {normed.emplace(bytes(mlp.in)).data(), mlp.in};
      norm(mlp.x, kNoMatrix, x, mlp.in, mlp.first);
    }
    const int last = mlp.count - 1;
    const Matrix result{out, mlp.layers[last].out};
    if (!(second && rounds_hidden(scales, x, result))) run_layers(scales, x, result);
    if (mlp.residual.data != nullptr) norm(result, mlp.residual, result, result.row_stride, mlp.last);
  }

 private:
  int64_t bytes(int64_t features) const { return mlp.rows * features * element_bytes(mlp.dtype); }

  // Launches both layers if the hidden values can be in e4m3 between them.
  bool rounds_hidden(const FloatScales& scales, const Matrix& x, const Matrix& out) {
    prepare(&first, scales, 0, x, kNoMatrix);
    prepare(&*second, scales, 1, {nullptr, mlp.layers[0].out}, out);
    return launch_with_rounded_hidden(first, *second, gpu, stream);
  }

  void run_layers(const FloatScales& scales, Matrix x, const Matrix& out) {
    if (!second) return launch(&first, scales, 0, x, out, false);
    const int64_t features = mlp.layers[0].out;
    const Scratch hidden(bytes(features));
    const Matrix result{hidden.data(), features};
    launch(&first, scales, 0, x, result, false);
    launch(&*second, scales, 1, result, out, first.plan.reads_codes());
  }

  void prepare(CodedLayer* layer, const FloatScales& scales, int number, const Matrix& x, const Matrix& out) const {
    layer->take(part_of(mlp.layers[number]), scales);
    layer->problem.a = x;
    layer->problem.out = out;
  }

  void launch(CodedLayer* layer, const FloatScales& scales, int number, const Matrix& x, const Matrix& out,
              bool early) const {
    prepare(layer, scales, number, x, out);
    if (layer->runs(CodedLoop::kScaled)) {
      const RoundedRows rounded(layer->problem, stream);
      return multiply_rounded(*layer, rounded.rows(), gpu, stream);
    }
    layer->problem.starts_early = early;
    check(launch_coded(layer->problem, layer->plan, gpu, stream));
  }

  void norm(const Matrix& x, const Matrix& residual, const Matrix& out, int64_t features, const Norm& norm) const {
    run_norm({x, residual, out, mlp.rows, features, mlp.dtype, norm, norms_overlap(gpu.major)}, gpu, stream);
  }
};

}  // namespace

std::function<void(void*)> plan_quantized_direct(const PlainMlp& mlp, const Gpu& gpu) {
  const Weights weights(mlp);
  const FloatScales scales(weights.span());
  const auto planned = [&](int number, const Matrix& x) {
    return CodedLayer(part_of(mlp.layers[number]), scales, x, mlp.rows, mlp.dtype, gpu);
  };
  const auto runs = [](const CodedLayer& layer) { return layer.fused() && layer.plan.loop != CodedLoop::kScaledMm; };
  const Matrix x = mlp.first.kind != NormKind::kNone ? Matrix{nullptr, mlp.in} : mlp.x;
  Steps steps{mlp, gpu, current_stream(mlp.device), planned(0, x), std::nullopt};
  if (!runs(steps.first) || !shares_format(part_of(mlp.layers[0]))) return {};
  if (mlp.count == 2 && !runs(steps.second.emplace(planned(1, {nullptr, mlp.layers[0].out})))) return {};
  return steps;
}

}  // namespace fused_mlp
