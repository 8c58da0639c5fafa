// MLPs and their blocks without tensors, by our kernels and torch's GEMMs.
#include "../quantized/direct.h"

#include <optional>

#include "../../torch-ext/calls/direct/plain.h"
#include "../norms/run_norm.h"
#include "../tensor_views.h"
#include "fused_gemm.h"
#include "torch/torch_layer.h"

namespace fused_mlp {
namespace {

Refusal refusal_of(const PlainLayer& layer) { return layer.transposed ? Refusal::kColumnMajorWeight : Refusal::kNone; }

// Launches the kernels of an MLP, one after the other.
struct Steps {
  PlainMlp mlp;
  FusedGemm first;
  std::optional<FusedGemm> second;

  void operator()(void* out) {
    std::optional<Scratch> normed, hidden;
    OptionalTensor torch_hidden;
    Matrix x = mlp.x;
    if (mlp.first.kind != NormKind::kNone) {
      x = {normed.emplace(bytes(mlp.in)).data(), mlp.in};
      norm(mlp.x, kNoMatrix, x, mlp.in, mlp.first);
    }
    if (second && first.fused()) {
      const int64_t features = mlp.layers[0].out;
      const Matrix result{hidden.emplace(bytes(features)).data(), features};
      first.launch(x.data, result.data);
      x = result;
    } else if (second) {
      torch_hidden = torch_layer(TensorViews(mlp).rows(x, mlp.in), layer_views(0).get());
      x = {torch_hidden->mutable_data_ptr(), mlp.layers[0].out};
    }
    const int number = mlp.count - 1;
    FusedGemm& last = second ? *second : first;
    // A norm or a scale after the MLP needs a separate kernel, which then adds the residual too.
    if (mlp.residual.data != nullptr && mlp.last.kind == NormKind::kNone && last.adds_to(mlp.residual)) {
      return last.launch(x.data, out, mlp.residual, mlp.last.factor);
    }
    if (last.fused()) {
      last.launch(x.data, out);
    } else {
      const TensorViews views(mlp);
      const int64_t features = mlp.layers[number].out;
      torch_layer_into(views.rows({out, features}, features), views.rows(x, in(number)), layer_views(number).get());
    }
    if (mlp.residual.data == nullptr) return;
    const Matrix result{out, mlp.layers[number].out};
    norm(result, mlp.residual, result, result.row_stride, mlp.last);
  }

  // True if torch allocates the result of the first layer.
  bool first_is_made_by_torch() const {
    return !first.fused() && torch_has_epilogue(first.problem.a, layer_views(0).get());
  }

 private:
  int64_t bytes(int64_t features) const { return mlp.rows * features * element_bytes(mlp.dtype); }
  int64_t in(int number) const { return number == 0 ? mlp.in : mlp.layers[number - 1].out; }
  LayerViews layer_views(int number) const { return {TensorViews(mlp), mlp.layers[number], in(number)}; }

  void norm(const Matrix& x, const Matrix& residual, const Matrix& out, int64_t features, const Norm& norm) const {
    run_norm({x, residual, out, mlp.rows, features, mlp.dtype, norm, norms_overlap(first.gpu.major)}, first.gpu,
             first.stream);
  }
};

}  // namespace

bool norm_directly(const PlainNorm& p, void* out) {
  int current = -1;
  if (cudaGetDevice(&current) != cudaSuccess || current != p.device) return false;
  const Gpu& its = gpu(p.device);
  run_norm({p.x, kNoMatrix, {out, p.cols}, p.rows, p.cols, p.dtype, p.norm, norms_overlap(its.major)}, its,
           current_stream(p.device));
  return true;
}

bool may_be_direct(DType, int64_t) { return true; }

std::function<void(void*)> plan_direct(const PlainMlp& mlp) {
  int current = -1;
  if (cudaGetDevice(&current) != cudaSuccess || current != mlp.device) return {};
  if (mlp.layers[0].packed != nullptr) return plan_quantized_direct(mlp, gpu(mlp.device));
  const bool normed = mlp.first.kind != NormKind::kNone;
  const Matrix x = normed ? Matrix{nullptr, mlp.in} : mlp.x;
  Steps steps{mlp,
              {{x, mlp.rows, mlp.in, mlp.dtype},
               mlp.layers[0],
               refusal_of(mlp.layers[0]),
               gpu(mlp.device),
               current_stream(mlp.device),
               {normed ? most_norm_ctas(mlp.rows) : 0, mlp.residual.data != nullptr}},
              std::nullopt};
  if (lacks_cublas_handle(steps.first, mlp.device)) return {};
  if (mlp.count == 2) {
    steps.second.emplace(steps.first.behind(mlp.layers[1], refusal_of(mlp.layers[1])));
    if (lacks_cublas_handle(*steps.second, mlp.device)) return {};
  } else if (steps.first_is_made_by_torch()) {
    return {};  // torch would not write into the given tensor
  }
  return steps;
}

}  // namespace fused_mlp
