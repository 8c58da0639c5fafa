#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define FUSED_MLP_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FUSED_MLP_HOST_DEVICE inline
#endif

namespace fused_mlp {

// The codes that torch-ext/fused_mlp/activations.py passes to the ops.
enum class Activation : int64_t {
  kLinear = 0,
  kGelu = 1,
  kGeluTanh = 2,
  kQuickGelu = 3,
  kSilu = 4,
  kRelu = 5,
  kRelu2 = 6,
  kSigmoid = 7,
};

// Calls visit.template operator()<A>() for the activation with the given code. This is the only place where a run-time
// code becomes a compile-time constant. Returns false if the code names no activation.
template <typename Visitor>
FUSED_MLP_HOST_DEVICE bool visit_activation(int64_t code, Visitor&& visit) {
  switch (static_cast<Activation>(code)) {
    case Activation::kLinear:
      visit.template operator()<Activation::kLinear>();
      return true;
    case Activation::kGelu:
      visit.template operator()<Activation::kGelu>();
      return true;
    case Activation::kGeluTanh:
      visit.template operator()<Activation::kGeluTanh>();
      return true;
    case Activation::kQuickGelu:
      visit.template operator()<Activation::kQuickGelu>();
      return true;
    case Activation::kSilu:
      visit.template operator()<Activation::kSilu>();
      return true;
    case Activation::kRelu:
      visit.template operator()<Activation::kRelu>();
      return true;
    case Activation::kRelu2:
      visit.template operator()<Activation::kRelu2>();
      return true;
    case Activation::kSigmoid:
      visit.template operator()<Activation::kSigmoid>();
      return true;
  }
  return false;
}

}  // namespace fused_mlp
