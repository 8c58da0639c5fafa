// Exposes the GEMMs of the architecture TUNED and the pointwise kernel to ctypes; the caller chooses the kernel.
#include "../../cuda/gemm/architecture.h"
#include "../../cuda/pointwise/pointwise.h"
#include "shape.h"

using namespace fused_mlp;

namespace {

cudaError_t launch(const tuning::Shape& shape, const GemmKernel& kernel, void* a, void* weight, void* up_weight,
                   void* out, cudaStream_t stream) {
  GemmProblem p = problem_of(shape);
  p.a.data = a;
  p.weight.data = weight;
  p.up_weight.data = up_weight;
  p.out.data = out;
  Gpu gpu{9, 0, static_cast<int>(shape.multiprocessors)};
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&gpu.shared_of_multiprocessor, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  }
  return error == cudaSuccess ? TUNED::kArchitecture.launch(p, {kernel, 0}, gpu, stream) : error;
}

}  // namespace

extern "C" cudaError_t tune_gemm(const tuning::Shape* s, const tuning::Kernel* k, void* a, void* weight,
                                 void* up_weight, void* out, cudaStream_t stream) {
  const GemmKernel kernel{static_cast<MainLoop>(k->loop),
                          problem_of(*s).product(),
                          k->block_m,
                          k->block_n,
                          static_cast<Schedule>(k->schedule),
                          k->split_k};
  return launch(*s, kernel, a, weight, up_weight, out, stream);
}

// The kernel at an index of the architecture's list.
extern "C" cudaError_t tune_listed(const tuning::Shape* s, int place, void* a, void* weight, void* up_weight, void* out,
                                   cudaStream_t stream) {
  return launch(*s, TUNED::kArchitecture.kernels[place], a, weight, up_weight, out, stream);
}

// gate = act(gate) * up, or act(gate) if up is null.
extern "C" cudaError_t tune_act_and_mul(const tuning::Shape* s, void* gate, void* up, cudaStream_t stream) {
  return launch_act_and_mul({gate, s->n}, {up, s->n}, {gate, s->n}, s->m, s->n, DType::kBFloat16, s->activation,
                            stream);
}
