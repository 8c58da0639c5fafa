// MLPs and their blocks where all kernels are ours, without tensors.
#include "../torch-ext/direct.h"

#include <optional>

#include "fused_gemm.h"
#include "norm.h"

namespace fused_mlp {
namespace {

// Queues the kernels of an MLP, one behind the other.
struct Steps {
  PlainMlp mlp;
  FusedGemm first;
  std::optional<FusedGemm> second;

  void operator()(void* out) {
    std::optional<Scratch> normed, hidden;
    const void* x = mlp.x.data;
    if (norms_first()) {
      x = normed.emplace(bytes(mlp.in)).data();
      norm(mlp.x, kNoMatrix, {const_cast<void*>(x), mlp.in}, mlp.in, mlp.first);
    }
    if (second) {
      first.launch(x, hidden.emplace(bytes(mlp.layers[0].out)).data());
      x = hidden->data();
    }
    FusedGemm& last = second ? *second : first;
    if (mlp.residual.data == nullptr) return last.launch(x, out);
    // A norm or a scale behind the MLP takes a kernel of its own, which then adds the residual too.
    if (mlp.last.kind == NormKind::kNone && last.adds_to(mlp.residual)) {
      return last.launch(x, out, mlp.residual, mlp.last.factor);
    }
    last.launch(x, out);
    const int64_t features = mlp.layers[mlp.count - 1].out;
    norm({out, features}, mlp.residual, {out, features}, features, mlp.last);
  }

  bool norms_first() const { return mlp.first.kind != NormKind::kNone; }

 private:
  int64_t bytes(int64_t features) const { return mlp.rows * features * element_bytes(mlp.dtype); }
  void norm(const Matrix& x, const Matrix& residual, const Matrix& out, int64_t features, const Norm& norm) const {
    check(launch_norm({x, residual, out, mlp.rows, features, mlp.dtype, norm, norms_overlap(first.gpu.major)},
                      first.stream));
  }
};

}  // namespace

bool may_be_direct(DType dtype, int64_t) { return dtype != DType::kFloat32; }

std::function<void(void*)> plan_direct(const PlainMlp& mlp) {
  int current = -1;
  if (cudaGetDevice(&current) != cudaSuccess || current != mlp.device) return {};
  const bool normed = mlp.first.kind != NormKind::kNone;
  const Matrix x = normed ? Matrix{nullptr, mlp.in} : mlp.x;
  Steps steps{mlp,
              {{x, mlp.rows, mlp.in, mlp.dtype},
               mlp.layers[0],
               Refusal::kNone,
               gpu(mlp.device),
               current_stream(mlp.device),
               {normed ? most_norm_ctas(mlp.rows) : 0, mlp.residual.data != nullptr}},
              std::nullopt};
  const auto takes = [&](const FusedGemm& gemm) { return gemm.fused() && !lacks_cublas_handle(gemm, mlp.device); };
  if (!takes(steps.first)) return {};
  if (mlp.count == 2) {
    steps.second.emplace(steps.first.behind(mlp.layers[1], Refusal::kNone));
    if (!takes(*steps.second)) return {};
  }
  return steps;
}

}  // namespace fused_mlp
