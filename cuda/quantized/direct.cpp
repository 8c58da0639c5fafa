// MLPs with quantised weights and their blocks without tensors, by kernels that read codes.
#include "direct.h"

#include <array>
#include <optional>

#include "../norms/run_norm.h"
#include "coded_layer.h"

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
    std::optional<Scratch> normed, hidden;
    Matrix x = mlp.x;
    if (mlp.first.kind != NormKind::kNone) {
      x = {normed.emplace(bytes(mlp.in)).data(), mlp.in};
      norm(mlp.x, kNoMatrix, x, mlp.in, mlp.first);
    }
    if (second) {
      const int64_t features = mlp.layers[0].out;
      const Matrix result{hidden.emplace(bytes(features)).data(), features};
      launch(&first, scales, 0, x, result, false);
      x = result;
    }
    const int last = mlp.count - 1;
    const Matrix result{out, mlp.layers[last].out};
    launch(second ? &*second : &first, scales, last, x, result, second.has_value());
    if (mlp.residual.data != nullptr) norm(result, mlp.residual, result, result.row_stride, mlp.last);
  }

 private:
  int64_t bytes(int64_t features) const { return mlp.rows * features * element_bytes(mlp.dtype); }

  void launch(CodedLayer* layer, const FloatScales& scales, int number, const Matrix& x, const Matrix& out,
              bool early) const {
    layer->take(part_of(mlp.layers[number]), scales);
    layer->problem.a = x;
    layer->problem.out = out;
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
  const auto runs = [](const CodedLayer& layer) { return layer.fused() && layer.plan.reads_codes(); };
  const Matrix x = mlp.first.kind != NormKind::kNone ? Matrix{nullptr, mlp.in} : mlp.x;
  Steps steps{mlp, gpu, current_stream(mlp.device), planned(0, x), std::nullopt};
  if (!runs(steps.first) || !shares_format(part_of(mlp.layers[0]))) return {};
  if (mlp.count == 2 && !runs(steps.second.emplace(planned(1, {nullptr, mlp.layers[0].out})))) return {};
  return steps;
}

}  // namespace fused_mlp
