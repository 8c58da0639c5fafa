// The operands of a mixture's experts, in the form that the kernels use.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <limits>

#include "../../torch-ext/operands/tensor_rows.h"
#include "../../torch-ext/torch_binding.h"
#include "../device.h"
#include "../gemm/architecture.h"

namespace fused_mlp {

using torch::headeronly::ScalarType;

inline bool aligned(const Tensor& tensor) { return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0; }

constexpr int64_t kMaxSlots = int64_t{1} << 24;
// In inference the number of inputs of transposed weights is a multiple of this, so that a step of k lies in one
// expert.
constexpr int kTransposedK = 64;

// Rows that the TMA can address: their elements are adjacent, and they are aligned to 16 bytes.
inline bool addressable(const TensorRows& rows) {
  return aligned(rows.tensor) && rows.row_stride % 8 == 0 && rows.row_stride >= rows.cols;
}

inline TensorRows addressable_rows(const Tensor& x) {
  const TensorRows rows(x);
  return addressable(rows) ? rows : TensorRows(torch::stable::clone(rows.tensor));
}

inline Routes routes_of(const Tensor& top_k_index, int64_t experts) {
  int bytes = 8;
  switch (top_k_index.scalar_type()) {
    case ScalarType::Int:
      bytes = 4;
      break;
    case ScalarType::Short:
      bytes = 2;
      break;
    case ScalarType::Char:
      bytes = 1;
      break;
    default:
      break;
  }
  return {top_k_index.const_data_ptr(), bytes, static_cast<int>(top_k_index.size(0)),
          static_cast<int>(top_k_index.size(1)), static_cast<int>(experts)};
}

inline WeightType weight_type(const Tensor& weights) {
  switch (weights.scalar_type()) {
    case ScalarType::Double:
      return WeightType::kFloat64;
    case ScalarType::Half:
      return WeightType::kFloat16;
    case ScalarType::BFloat16:
      return WeightType::kBFloat16;
    default:
      return WeightType::kFloat32;
  }
}

// One layer. `weight` holds `parts` weight matrices, with their features concatenated or interleaved.
struct ExpertLayer {
  const Tensor& weight;  // [experts, parts * n, k], or transposed [experts, k, parts * n]
  OptionalTensor bias;
  int parts;
  bool in_turns;
  bool transposed;

  GroupedProblem problem(const Routes& routes, DType dtype, int slots_of_row) const {
    const int64_t experts = weight.size(0), n = weight.size(transposed ? 2 : 1) / parts;
    const int64_t k = weight.size(transposed ? 1 : 2), row = weight.stride(1);
    constexpr const char* kUnaligned = "the rows of weights must be aligned";
    STD_TORCH_CHECK(weight.stride(2) == 1 && row % 8 == 0 && row >= std::max<int64_t>(weight.size(2), 1), kUnaligned);
    const int64_t rows = experts == 1 ? weight.size(1) : weight.stride(0) / row;
    const int step = in_turns ? parts : 1;       // from a gate to the next
    const int row_step = transposed ? 1 : step;  // in rows
    STD_TORCH_CHECK(n > 0 && k > 0 && n % 8 == 0 && k % 8 == 0, "features must be multiples of 8");
    STD_TORCH_CHECK(rows >= weight.size(1) && rows % row_step == 0 && (experts == 1 || weight.stride(0) % row == 0),
                    kUnaligned);
    STD_TORCH_CHECK(experts * rows < std::numeric_limits<int32_t>::max() - 1024,
                    "weights must have fewer than 2^31 rows");
    GroupedProblem p{};
    p.gemm = {.m = routes.slots(), .n = n, .k = k, .dtype = dtype};
    p.gemm.weight = {const_cast<void*>(weight.const_data_ptr()), row * row_step};
    p.gemm.out.row_stride = n;
    p.routes = routes;
    p.slots_of_row = slots_of_row;
    p.weight_rows = rows / row_step;
    p.transposed = transposed;
    p.interleaved = in_turns;
    p.limits = {std::numeric_limits<float>::infinity(), 0.0f};
    const auto at = [](const void* data, int64_t elements) {
      return static_cast<char*>(const_cast<void*>(data)) + elements * 2;
    };
    const int64_t between = in_turns ? 1 : n;  // rows, from an operand to the next
    const int64_t up = transposed ? 0 : between * row;
    if (parts == 2) p.gemm.up_weight = {at(weight.const_data_ptr(), up), row * row_step};
    if (bias) {
      p.bias_stride = bias->stride(0);
      p.bias_step = bias->stride(1) * step;
      p.gemm.epilogue.bias = bias->const_data_ptr();
      if (parts == 2) p.gemm.epilogue.up_bias = at(bias->const_data_ptr(), between * bias->stride(1));
    }
    return p;
  }
};

// The kernels for experts on the GPU of x.
struct ExpertKernels {
  const Gpu& gpu;
  const Architecture* architecture;
  const GroupedKernels& kernels;

  // A low-rank term needs the kernels of the GPU's own architecture.
  static ExpertKernels of(const Tensor& x, const GroupedProblem& first, bool has_low_rank) {
    const Gpu& found = fused_mlp::gpu(x.get_device_index());
    return of(found, has_low_rank ? architecture_of(found) : architecture_of_experts(found, first));
  }
  static ExpertKernels of_training(const Tensor& x) {
    const Gpu& found = fused_mlp::gpu(x.get_device_index());
    return of(found, architecture_of_trained_experts(found));
  }

 private:
  static ExpertKernels of(const Gpu& gpu, const Architecture* architecture) {
    STD_TORCH_CHECK(architecture != nullptr && architecture->grouped != nullptr, "no experts kernel for this GPU");
    return {gpu, architecture, *architecture->grouped};
  }
};

inline void check_size(int64_t slots, int64_t experts) {
  STD_TORCH_CHECK(slots < kMaxSlots, "top_k_index must have fewer than ", kMaxSlots, " elements");
  STD_TORCH_CHECK(experts <= kMaxGroupedExperts, "weights must hold at most ", kMaxGroupedExperts, " experts");
}

}  // namespace fused_mlp
