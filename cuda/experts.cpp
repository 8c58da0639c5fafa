// The experts of a mixture on a GPU: two grouped GEMMs and a weighted sum, and for many tokens a sort before them. None
// waits for the host.
#include "gemm/experts.h"

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <limits>
#include <string>

#include "../torch-ext/activation.h"
#include "../torch-ext/operands.h"
#include "../torch-ext/plan.h"
#include "../torch-ext/tensor_rows.h"
#include "../torch-ext/torch_binding.h"
#include "device.h"

namespace fused_mlp {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::accelerator::DeviceGuard;

bool aligned(const Tensor& tensor) { return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0; }

constexpr int64_t kMaxSlots = int64_t{1} << 24;
// The inputs of transposed weights are a multiple of this, so that a step of k lies in one expert.
constexpr int kTransposedK = 64;

// What the TMA can address: rows of adjacent elements, that begin at multiples of 16 bytes.
bool addressable(const TensorRows& rows) {
  return aligned(rows.tensor) && rows.row_stride % 8 == 0 && rows.row_stride >= rows.cols;
}

TensorRows addressable_rows(const Tensor& x) {
  const TensorRows rows(x);
  return addressable(rows) ? rows : TensorRows(torch::stable::clone(rows.tensor));
}

Routes routes_of(const Tensor& top_k_index, int64_t experts) {
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

WeightType weight_type(const Tensor& weights) {
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

// One layer. `parts` matrices of weights lie in `weight`, their features one after the other or in turns.
struct ExpertLayer {
  const Tensor& weight;  // [experts, parts * n, k], or where transposed [experts, k, parts * n]
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
    const int k_step = transposed ? kTransposedK : 8;
    STD_TORCH_CHECK(n > 0 && k > 0 && n % 8 == 0 && k % k_step == 0, "features must be multiples of ", k_step);
    STD_TORCH_CHECK(rows >= weight.size(1) && rows % row_step == 0 && (experts == 1 || weight.stride(0) % row == 0),
                    kUnaligned);
    STD_TORCH_CHECK(experts * rows < std::numeric_limits<int32_t>::max() - 1024,
                    "weights must have less than 2^31 rows");
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

// The GPU of x, which must have kernels for experts.
const Gpu& gpu_of(const Tensor& x) {
  const Gpu& found = gpu(x.get_device_index());
  STD_TORCH_CHECK(found.major == 9 && found.minor == 0, "there is no kernel for experts on this GPU");
  return found;
}

void check_size(int64_t slots, int64_t experts) {
  STD_TORCH_CHECK(slots < kMaxSlots, "top_k_index must have less than ", kMaxSlots, " elements");
  STD_TORCH_CHECK(experts <= kMaxGroupedExperts, "weights must be those of at most ", kMaxGroupedExperts, " experts");
}

}  // namespace

Tensor experts_mlp(const Tensor& x, const Tensor& top_k_index, const Tensor& top_k_weights,
                   const Tensor& gate_up_weight, const Tensor& down_weight, const OptionalTensor& gate_up_bias,
                   const OptionalTensor& down_bias, int64_t activation, bool gated, bool interleaved, bool transposed,
                   std::optional<double> limit, double up_offset) {
  check_experts(x, top_k_index, top_k_weights, gate_up_weight, down_weight, gate_up_bias, down_bias, activation, gated,
                interleaved, transposed, limit, up_offset);
  const DType dtype = dtype_of(x, "x");
  STD_TORCH_CHECK(dtype != DType::kFloat32, "x must be bfloat16 or float16");
  check_size(top_k_index.numel(), gate_up_weight.size(0));
  const DeviceGuard device_guard(x.get_device_index());
  const Gpu& device = gpu_of(x);

  const Tensor index = torch::stable::contiguous(top_k_index), weights = torch::stable::contiguous(top_k_weights);
  const Tensor gate_up = aligned(gate_up_weight) ? gate_up_weight : torch::stable::clone(gate_up_weight);
  const Tensor down = aligned(down_weight) ? down_weight : torch::stable::clone(down_weight);
  const Routes routes = routes_of(index, gate_up.size(0));
  GroupedProblem first =
      ExpertLayer{gate_up, gate_up_bias, gated ? 2 : 1, interleaved, transposed}.problem(routes, dtype, routes.top_k);
  GroupedProblem second = ExpertLayer{down, down_bias, 1, false, transposed}.problem(routes, dtype, 1);

  const Tensor out = new_dense(x, {x.size(0), second.gemm.n});
  if (out.numel() == 0) return out;
  const TensorRows rows = addressable_rows(x);
  first.gemm.epilogue.activation = activation;
  const GroupedPlan plan = sm90::plan_grouped(first, device.multiprocessors);
  const bool sorts = plan.sorts;
  const int64_t slots = sorts ? int64_t{plan.row_tiles} * plan.rows : routes.slots();
  const Tensor hidden = new_dense(x, {slots, first.gemm.n}), results = new_dense(x, {slots, second.gemm.n});
  first.gemm.a = matrix(rows);
  const Tensor sorted = new_dense(x, {sorts ? slots : 0, rows.cols});
  const Tensor lists =
      new_dense(x, {sorts ? (routes.slots() + plan.row_tiles + 1) * 2 : 0});  // of int, in 16-bit elements
  RowSort sort{routes, matrix(rows), rows.cols, plan.rows};
  if (sorts) {
    sort.sorted = sorted.mutable_data_ptr();
    sort.row_of_slot = static_cast<int*>(lists.mutable_data_ptr());
    sort.codes = sort.row_of_slot + routes.slots();
    sort.count = sort.codes + plan.row_tiles;
    first.gemm.a = {sort.sorted, rows.cols};
  }
  for (GroupedProblem* problem : {&first, &second}) problem->blocks = {sort.codes, sort.count};
  if (limit) first.limits.limit = static_cast<float>(*limit);
  first.limits.up_offset = static_cast<float>(up_offset);
  first.gemm.out.data = hidden.mutable_data_ptr();
  second.gemm.a = {hidden.mutable_data_ptr(), first.gemm.n};
  second.gemm.epilogue.activation = static_cast<int64_t>(Activation::kLinear);
  second.gemm.out.data = results.mutable_data_ptr();
  second.gemm.follows_gemm = true;
  const WeightedSum sum{routes,
                        results.const_data_ptr(),
                        sort.row_of_slot,
                        weights.const_data_ptr(),
                        weight_type(weights),
                        out.mutable_data_ptr(),
                        static_cast<int>(second.gemm.n),
                        dtype};
  check(sm90::launch_experts(sorts ? &sort : nullptr, first, second, sum, device.multiprocessors, current_stream(x)));
  return out;
}

std::string plan_experts(const Tensor& x, const Tensor& gate_up_weight, const Tensor& down_weight, int64_t top_k,
                         bool transposed) {
  STD_TORCH_CHECK(x.dim() == 2 && top_k > 0 && x.size(0) > 0, "operands must be those of a call");
  check_size(x.size(0) * top_k, gate_up_weight.size(0));
  const Gpu& device = gpu_of(x);
  const Routes routes{nullptr, 8, static_cast<int>(x.size(0)), static_cast<int>(top_k),
                      static_cast<int>(gate_up_weight.size(0))};
  const int parts = gate_up_weight.size(transposed ? 2 : 1) == down_weight.size(transposed ? 1 : 2) ? 1 : 2;
  PlanRecord record;
  for (const ExpertLayer& layer : {ExpertLayer{gate_up_weight, {}, parts, false, transposed},
                                   ExpertLayer{down_weight, {}, 1, false, transposed}}) {
    const GroupedPlan plan = sm90::plan_grouped(layer.problem(routes, dtype_of(x, "x"), 1), device.multiprocessors);
    record.layer()
        .set("implementation", "sm90")
        .set("kernel", plan.loop == MainLoop::kTiled ? "grouped_tiled" : "grouped")
        .set("block_m", plan.rows);
    record.set("split_k", plan.split_k);
  }
  return record.text();
}

}  // namespace fused_mlp
