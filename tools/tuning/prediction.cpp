// The choice of a GEMM of sm_80 for any GPU that can be described, for ctypes. Includes no CUDA header.
#include <cstring>

#include "../../cuda/gemm/record.h"
#include "../../cuda/sm80/plan.h"
#include "../../cuda/sm80/time_model.h"
#include "shape.h"

using namespace fused_mlp;

extern "C" {

struct Prediction {
  int kernel;  // in the list, the one of the least time that the GPU has the shared memory for
  int ours;    // whether it is taken
  double microseconds, torch_microseconds;
  char record[256];  // of a gated layer, as the ops write it
};

// A layer without biases, or with them: torch has an epilogue of its own for some of these.
void predict(const Gpu* gpu, const tuning::Shape* shape, int biased, Prediction* prediction) {
  GemmProblem p = tuning::problem_of(*shape);
  static const char somewhere = 0;
  if (biased != 0) p.epilogue.bias = p.epilogue.up_bias = &somewhere;
  GemmPlan plan{};
  prediction->ours = sm80::decide(p, *gpu, &plan) == Refusal::kNone;
  prediction->kernel = 0;
  while (!(sm80::kKernels[prediction->kernel] == plan.kernel)) ++prediction->kernel;
  prediction->microseconds = plan.microseconds;
  prediction->torch_microseconds = sm80::torch_microseconds(p, *gpu);
  PlanRecord record;
  record.layer();
  if (prediction->ours != 0) {
    record_kernel("sm80", plan.kernel, true, &record);
  } else {
    record.set("implementation", "torch").set("refusal", code(Refusal::kTorchByModel)).set("pointwise", "cuda");
  }
  std::strncpy(prediction->record, record.text().c_str(), sizeof(prediction->record) - 1);
}

// Threads, bytes of shared memory and weight rows of a tile of a listed kernel; -1 past the end.
int described(int kernel, int* threads, int* shared_bytes) {
  if (kernel >= static_cast<int>(sm80::kKernels.size())) return -1;
  *threads = sm80::kListed[kernel].shape.threads();
  *shared_bytes = sm80::kListed[kernel].shared_bytes;
  return 0;
}
}
