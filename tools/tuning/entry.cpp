// The sm_90a GEMMs and the pointwise kernel for ctypes, with the kernel of the caller's choice. All matrices are bf16
// and contiguous, and there are no biases.
#include "../../cuda/pointwise.h"
#include "../../cuda/sm90/gemm.h"

namespace {

using fused_mlp::DType;
using namespace fused_mlp::sm90;

// As in tuning.bench.
struct Shape {
  int64_t m, n, k, activation, multiprocessors;
};

struct Kernel {
  int streamed, block_m, block_n, ping_pong, split_k;
};

GemmProblem problem(const Shape& s, void* a, void* weight, void* up_weight, void* out) {
  GemmProblem p{};
  p.a = {a, s.k};
  p.weight = {weight, s.k};
  p.up_weight = {up_weight, s.k};
  p.out = {out, s.n};
  p.m = s.m;
  p.n = s.n;
  p.k = s.k;
  p.dtype = DType::kBFloat16;
  p.activation = s.activation;
  return p;
}

}  // namespace

extern "C" cudaError_t tune_gemm(const Shape* s, const Kernel* kernel, void* a, void* weight, void* up_weight,
                                 void* out, cudaStream_t stream) {
  const auto way = kernel->streamed ? GemmPlan::Kernel::kStreamed : GemmPlan::Kernel::kTiled;
  const GemmPlan plan = {way, kernel->block_m, kernel->block_n, kernel->ping_pong != 0, kernel->split_k, 0, ""};
  return gemm(problem(*s, a, weight, up_weight, out), plan, static_cast<int>(s->multiprocessors), stream);
}

// The kernel that a call of the package would launch.
extern "C" void tune_plan(const Shape* s, void* up_weight, Kernel* kernel) {
  const GemmPlan chosen = plan(problem(*s, nullptr, nullptr, up_weight, nullptr), static_cast<int>(s->multiprocessors));
  *kernel = {chosen.kernel == GemmPlan::Kernel::kStreamed, chosen.block_m, chosen.block_n, chosen.ping_pong,
             chosen.split_k};
}

// gate = act(gate) * up, or act(gate) where up is null.
extern "C" cudaError_t tune_act_and_mul(const Shape* s, void* gate, void* up, cudaStream_t stream) {
  return fused_mlp::launch_act_and_mul({gate, s->n}, {up, s->n}, {gate, s->n}, s->m, s->n, DType::kBFloat16,
                                       s->activation, stream);
}
