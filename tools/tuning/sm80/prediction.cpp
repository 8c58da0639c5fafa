// Exposes the choice of an sm_80 GEMM for any described GPU to ctypes. Includes no CUDA header.
#include <algorithm>
#include <cstring>
#include <iterator>

#include "../../../cuda/gemm/choice/record.h"
#include "../../../cuda/sm80/grouped/grouped_plan.h"
#include "../../../cuda/sm80/plan/plan.h"
#include "../../../cuda/sm80/plan/time_model.h"
#include "../shape.h"

using namespace fused_mlp;

extern "C" {

struct Prediction {
  int kernel;  // in the list: the fastest one that fits into the GPU's shared memory
  int ours;    // true if it is chosen
  double microseconds, torch_microseconds;
  char record[256];  // of a gated layer, as the ops write it
};

// A layer with or without biases: torch has a special epilogue for some of these.
void predict(const Gpu* gpu, const tuning::Shape* shape, int biased, Prediction* prediction) {
  GemmProblem p = tuning::problem_of(*shape);
  static const char somewhere = 0;
  if (biased != 0) p.epilogue.bias = p.epilogue.up_bias = &somewhere;
  GemmPlan plan{};
  const Refusal refusal = sm80::decide(p, *gpu, &plan);
  prediction->ours = refusal == Refusal::kNone;
  prediction->kernel = 0;
  while (!(sm80::kKernels[prediction->kernel] == plan.kernel)) ++prediction->kernel;
  prediction->microseconds = plan.microseconds;
  prediction->torch_microseconds = sm80::torch_microseconds(p, *gpu);
  PlanRecord record;
  record.layer();
  if (prediction->ours != 0) {
    record_kernel("sm80", plan.kernel, !sm80::tuning_of(*gpu).measured(), &record);
  } else {
    record.set("implementation", "torch").set("refusal", code(refusal)).set("pointwise", "cuda");
  }
  std::strncpy(prediction->record, record.text().c_str(), sizeof(prediction->record) - 1);
}

// The same for a training product, by its number in Product: whether ours is chosen, and both estimated times.
int predict_training(const Gpu* gpu, int product, const int64_t* sizes, double* microseconds) {
  GemmProblem p{};
  p.m = sizes[0], p.n = sizes[1], p.k = sizes[2];
  p.dtype = DType::kBFloat16;
  p.kind = static_cast<Product>(product);
  p.epilogue.activation = static_cast<int64_t>(p.pair() ? Activation::kLinear : Activation::kSilu);
  GemmPlan plan{};
  const bool ours = sm80::decide(p, *gpu, &plan) == Refusal::kNone;
  microseconds[0] = plan.microseconds;
  microseconds[1] = sm80::torch_microseconds(p, *gpu);
  return ours ? 1 : 0;
}

// Gated experts, by tokens, choices per token, experts, width and hidden width: whether ours are chosen, the rows of a
// tile, and both estimated times, in inference or for a forward and its backward.
int predict_experts(const Gpu* gpu, const int64_t* sizes, int transposed, int trained, int* rows,
                    double* microseconds) {
  const Routes routes{nullptr, 8, static_cast<int>(sizes[0]), static_cast<int>(sizes[1]), static_cast<int>(sizes[2])};
  static char weight = 0;
  GroupedProblem first{}, second{};
  first.gemm.n = sizes[4], first.gemm.k = sizes[3];
  first.gemm.up_weight.data = &weight;
  second.gemm.n = sizes[3], second.gemm.k = sizes[4];
  first.routes = second.routes = routes;
  first.transposed = second.transposed = transposed != 0;
  if (trained != 0) {
    *rows = sm80::plan_trained_experts(routes).rows;
    microseconds[0] = sm80::trained_experts_microseconds(first, second, *gpu);
    microseconds[1] = sm80::torch_trained_experts_microseconds(first, second, *gpu);
    return sm80::decide_trained_experts(first, second, *gpu) == Refusal::kNone ? 1 : 0;
  }
  *rows = sm80::plan_grouped(first, *gpu).rows;
  microseconds[0] = sm80::experts_microseconds(first, second, *gpu);
  microseconds[1] = sm80::torch_experts_microseconds(first, second, *gpu);
  return sm80::decide_experts(first, second, *gpu) == Refusal::kNone ? 1 : 0;
}

// The kernel of the list that a Hopper GPU considers beside its own, or -1.
int beside_sm90(const Gpu* gpu, const tuning::Shape* shape, double* microseconds) {
  const GemmPlan plan = sm80::choose_beside_sm90(tuning::problem_of(*shape), *gpu);
  *microseconds = plan.microseconds;
  const auto found = std::find(std::begin(sm80::kKernels), std::end(sm80::kKernels), plan.kernel);
  return found == std::end(sm80::kKernels) ? -1 : static_cast<int>(found - std::begin(sm80::kKernels));
}

// The estimate of a listed kernel, whether or not the GPU has code for it.
double estimated(const Gpu* gpu, const tuning::Shape* shape, int kernel) {
  return sm80::estimated_microseconds(tuning::problem_of(*shape), sm80::kListed[kernel], *gpu);
}

// Peak operations per microsecond of all multiprocessors.
double flops_per_microsecond(const Gpu* gpu) { return sm80::flops_per_microsecond(*gpu) * gpu->multiprocessors; }

// The present members of Tuning after the capability, for a GPU.
void constants(const Gpu* gpu, double* values) {
  const sm80::Tuning& t = sm80::tuning_of(*gpu);
  for (double share : t.of_peak) *values++ = share;
  for (double each : {t.share_of_bandwidth, t.start, t.torch_of_peak, t.torch_share_of_bandwidth, t.torch_start}) {
    *values++ = each;
  }
}

// Rows and weight rows of a tile for which Tuning has a share; -1 past the end.
int tile(int index, int* sizes) {
  if (index >= static_cast<int>(std::size(sm80::kTiles))) return -1;
  for (int side = 0; side < 2; ++side) sizes[side] = sm80::kTiles[index][side];
  return 0;
}

// True if the choice on a GPU includes a listed kernel.
int offered(const Gpu* gpu, int kernel) { return sm80::offered(kernel, *gpu) ? 1 : 0; }

// A listed kernel, like Listed in prediction.py; -1 past the end.
int described(int kernel, int* values) {
  if (kernel >= static_cast<int>(sm80::kKernels.size())) return -1;
  const sm80::ListedKernel& listed = sm80::kListed[kernel];
  const GemmKernel& k = listed.kernel;
  for (int each : {static_cast<int>(k.loop), static_cast<int>(k.product), k.block_m, k.block_n, listed.shape.threads(),
                   listed.shared_bytes}) {
    *values++ = each;
  }
  return 0;
}
}
