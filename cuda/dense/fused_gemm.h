// One kernel for a whole layer, or the reason why there is none.
#pragma once

#include "../../torch-ext/calls/direct/plain.h"
#include "../device.h"
#include "../gemm/architecture.h"

namespace fused_mlp {

// The operand of a layer: rows of k elements. Its data may be null until the launch.
struct Input {
  Matrix matrix;
  int64_t rows;
  int64_t cols;
  DType dtype;
};

struct FusedGemm {
  const Architecture* architecture;
  const Gpu& gpu;
  cudaStream_t stream;
  Launcher launcher;  // the choice for a launch by the CPU may differ from that in a graph
  GemmProblem problem{};
  GemmPlan plan{};
  Refusal refusal;

  // `described`: why no kernel can read the layer's weights or biases, or kNone.
  FusedGemm(const Input& x, const PlainLayer& layer, Refusal described, const Gpu& gpu, cudaStream_t stream,
            Place place)
      : FusedGemm(x, layer, described, gpu, stream, launcher_of(place, stream), place.ctas_before, false) {}

  // Plans a layer on this one's result, before either is launched.
  FusedGemm behind(const PlainLayer& layer, Refusal described) const {
    const Input x{{nullptr, problem.n}, problem.m, problem.n, problem.dtype};
    return {x, layer, described, gpu, stream, launcher, ctas(), fused()};
  }

  bool fused() const { return refusal == Refusal::kNone; }
  int64_t ctas() const { return fused() ? ctas_of(problem, plan.kernel) : 0; }

  // True if the kernel can add its result to rows with this layout.
  bool adds_to(const Matrix& addend) const {
    const bool pairs = reinterpret_cast<uintptr_t>(addend.data) % 4 == 0 && addend.row_stride % 2 == 0;
    return fused() && pairs && plan.kernel.loop == MainLoop::kStreamed && plan.kernel.product == Product::kPlain;
  }

  // Computes the layer, and if there is an addend, addend + factor * result.
  void launch(const void* a, void* out, const Matrix& addend = kNoMatrix, float factor = 1.0f) {
    problem.epilogue.addend = addend;
    problem.epilogue.factor = factor;
    problem.a.data = const_cast<void*>(a);
    problem.out.data = out;
    check(plan.architecture->launch(problem, plan, gpu, stream));
  }

 private:
  static Launcher launcher_of(const Place& place, cudaStream_t stream) {
    if (is_captured(stream)) return Launcher::kGraph;
    return place.in_block ? Launcher::kCpuInBlock : Launcher::kCpu;
  }

  FusedGemm(const Input& x, const PlainLayer& layer, Refusal described, const Gpu& gpu, cudaStream_t stream,
            Launcher launcher, int64_t ctas_before, bool behind_gemm)
      : architecture(architecture_of(gpu)),
        gpu(gpu),
        stream(stream),
        launcher(launcher),
        refusal(choose(x, layer, described, ctas_before, behind_gemm)) {}

  Refusal choose(const Input& x, const PlainLayer& layer, Refusal described, int64_t ctas_before, bool behind_gemm) {
    problem.a = x.matrix;
    problem.weight = layer.weight;
    problem.up_weight = layer.up_weight;
    problem.out = {nullptr, layer.out};
    problem.m = x.rows;
    problem.n = layer.out;
    problem.k = x.cols;
    problem.dtype = x.dtype;
    problem.epilogue = {layer.bias, layer.up_bias, layer.activation};
    problem.ctas_before = ctas_before;
    problem.behind_norm = ctas_before > 0 && !behind_gemm;
    if (architecture == nullptr) return Refusal::kGpu;
    return described == Refusal::kNone ? choose_gemm(*architecture, problem, gpu, &plan, launcher) : described;
  }
};

// A thread's first torch product on a GPU creates a cuBLAS handle, which is not possible while a stream is captured. A
// GEMM of ours may become torch's in a graph, and all products before may have been ours, so torch has to create one
// before.
bool lacks_cublas_handle(const FusedGemm& gemm, int32_t device);

}  // namespace fused_mlp
