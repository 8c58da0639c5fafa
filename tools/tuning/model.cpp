// Exposes the choice of a kernel and its time model to ctypes. Includes no CUDA header and calls no CUDA function.
#include <cstring>

#include "../../cuda/sm90/plan/plan.h"
#include "../../cuda/sm90/plan/time_model.h"
#include "../../cuda/sm90/plan/tuning.h"
#include "shape.h"

using namespace fused_mlp;

namespace {

GemmKernel kernel_of(const GemmProblem& p, const tuning::Kernel& k) {
  return {static_cast<MainLoop>(k.loop),     p.product(), k.block_m, k.block_n,
          static_cast<Schedule>(k.schedule), k.split_k};
}

tuning::Kernel plain(const GemmKernel& kernel) {
  return {static_cast<int>(kernel.loop), kernel.block_m, kernel.block_n, static_cast<int>(kernel.schedule),
          kernel.split_k};
}

// The constants are a struct of doubles, in the order of its members.
template <typename Time>
double estimated(const GemmProblem& p, const GemmKernel& kernel, const double* constants, const sm90::Chip& chip) {
  Time time;
  std::memcpy(&time, constants, sizeof(time));
  return sm90::estimated_microseconds(p, kernel, time, chip);
}

}  // namespace

// Writes every kernel that can compute the shape to `kernels`, if it is not null, and returns how many there are.
extern "C" int tune_candidates(const tuning::Shape* shape, tuning::Kernel* kernels) {
  int count = 0;
  sm90::for_each_candidate(problem_of(*shape), static_cast<int>(shape->multiprocessors),
                           [&](size_t, const GemmKernel& kernel) {
                             if (kernels != nullptr) kernels[count] = plain(kernel);
                             ++count;
                           });
  return count;
}

// The kernel that tuning.h's constants choose on the chip where they were measured, except for its multiprocessors.
extern "C" void tune_choose(const tuning::Shape* shape, tuning::Kernel* kernel) {
  const sm90::Chip chip{static_cast<int>(shape->multiprocessors), sm90::kPeak.bytes_per_microsecond, 1.0};
  *kernel = plain(sm90::choose(problem_of(*shape), chip).kernel);
}

// The estimates for `count` pairs of a shape and a kernel, each with its own constants, `stride` doubles apart.
extern "C" void tune_estimate(const tuning::Shape* shapes, const tuning::Kernel* kernels, const double* constants,
                              int64_t stride, int64_t count, double bytes_per_microsecond, double* microseconds) {
  for (int64_t i = 0; i < count; ++i) {
    const GemmProblem p = problem_of(shapes[i]);
    const GemmKernel kernel = kernel_of(p, kernels[i]);
    const auto estimate = kernel.loop == MainLoop::kTiled ? estimated<sm90::TiledTime> : estimated<sm90::StreamedTime>;
    const sm90::Chip chip{static_cast<int>(shapes[i].multiprocessors), bytes_per_microsecond, 1.0};
    microseconds[i] = estimate(p, kernel, constants + i * stride, chip);
  }
}

// The estimates of torch's way for `count` shapes, with constants in the order of TorchTime's members.
extern "C" void tune_torch(const tuning::Shape* shapes, const sm90::TorchTime* constants, int64_t count,
                           double bytes_per_microsecond, double* microseconds) {
  for (int64_t i = 0; i < count; ++i) {
    const sm90::Chip chip{static_cast<int>(shapes[i].multiprocessors), bytes_per_microsecond, 1.0};
    microseconds[i] = sm90::torch_microseconds(problem_of(shapes[i]), *constants, chip);
  }
}
