// The experts of a mixture on a GPU: two grouped GEMMs and a weighted sum, and with many tokens a sort before them.
// Nothing waits for the host.
#include <torch/csrc/stable/ops.h>

#include <string>

#include "../../torch-ext/operands/activation.h"
#include "../../torch-ext/operands/operands.h"
#include "../../torch-ext/ops/plan.h"
#include "expert_adapters.h"

namespace fused_mlp {

namespace {

// A matrix with adjacent elements. torch's dispatcher is called only if the matrix has to be copied.
Tensor dense(const Tensor& matrix) {
  return matrix.stride(1) == 1 && matrix.stride(0) == matrix.size(1) ? matrix : torch::stable::contiguous(matrix);
}

// Writes into a new tensor if none is given.
Tensor compute_experts(const OptionalTensor& into, const OptionalTensor& residual, const Tensor& x,
                       const Tensor& top_k_index, const Tensor& top_k_weights, const Tensor& gate_up_weight,
                       const Tensor& down_weight, const OptionalTensor& gate_up_bias, const OptionalTensor& down_bias,
                       const std::vector<OptionalTensor>& factors, const std::vector<double>& scalings,
                       int64_t activation, bool gated, bool interleaved, bool transposed, std::optional<double> limit,
                       double up_offset) {
  check_experts(x, top_k_index, top_k_weights, gate_up_weight, down_weight, gate_up_bias, down_bias, activation, gated,
                interleaved, transposed, limit, up_offset);
  const DType dtype = dtype_of(x, "x");
  STD_TORCH_CHECK(dtype != DType::kFloat32, "x must be bfloat16 or float16");
  check_size(top_k_index.numel(), gate_up_weight.size(0));
  const DeviceGuard device_guard(x.get_device_index());
  const Tensor index = dense(top_k_index), weights = dense(top_k_weights);
  const Tensor gate_up = aligned(gate_up_weight) ? gate_up_weight : torch::stable::clone(gate_up_weight);
  const Tensor down = aligned(down_weight) ? down_weight : torch::stable::clone(down_weight);
  const Routes routes = routes_of(index, gate_up.size(0));
  GroupedProblem first =
      ExpertLayer{gate_up, gate_up_bias, gated ? 2 : 1, interleaved, transposed}.problem(routes, dtype, routes.top_k);
  GroupedProblem second = ExpertLayer{down, down_bias, 1, false, transposed}.problem(routes, dtype, 1);

  STD_TORCH_CHECK(!transposed || (first.gemm.k % kTransposedK == 0 && second.gemm.k % kTransposedK == 0),
                  "features must be multiples of ", kTransposedK);
  const ExpertKernels chosen = ExpertKernels::of(x, first, !factors.empty());
  const Gpu& device = chosen.gpu;

  const Tensor out = into ? *into : new_dense(x, {x.size(0), second.gemm.n});
  if (out.numel() == 0) return out;
  const TensorRows rows = addressable_rows(x);
  first.gemm.epilogue.activation = activation;
  const GroupedPlan plan = chosen.kernels.plan(first, device);
  const bool sorts = plan.sorts;
  const int64_t slots = sorts ? plan.sorted_rows : routes.slots();
  const Tensor hidden = new_dense(x, {slots, first.gemm.n}), results = new_dense(x, {slots, second.gemm.n});
  first.gemm.a = matrix(rows);
  const bool fitted = plan.fits;
  const ExpertAdapters adapters(factors, scalings, x, routes, gate_up, down);
  STD_TORCH_CHECK(!adapters.any() || (chosen.kernels.adds_low_rank && !transposed),
                  "no kernel supports adapters for these experts");
  const bool gathers =
      plan.gathers && !adapters.any() && rows.rows * rows.row_stride / 8 <= std::numeric_limits<uint32_t>::max();
  const Tensor sorted = sorts && !gathers ? new_dense(x, {slots, rows.cols}) : Tensor();
  const int64_t of_tile = (fitted ? sizeof(FittedTile) : sizeof(int)) / 2;  // in 16-bit elements, like the lists
  const int64_t gathered = gathers ? slots : 0;
  const Tensor lists =
      sorts ? new_dense(x, {plan.row_tiles * of_tile + 2 * (1 + routes.slots() + gathered)}) : Tensor();
  RowSort sort{routes, matrix(rows), rows.cols, fitted ? kFittedStep : plan.rows};
  sort.tile_rows = plan.rows;
  if (sorts) {
    void* tiles = lists.mutable_data_ptr();
    int* count = static_cast<int*>(tiles) + plan.row_tiles * of_tile / 2;
    sort.row_of_slot = count + 1;
    if (fitted) {
      sort.tiles = static_cast<FittedTile*>(tiles);
      sort.tile_count = count;
    } else {
      sort.codes = static_cast<int*>(tiles);
      sort.count = count;
    }
    if (gathers) {
      sort.token_of_row = sort.row_of_slot + routes.slots();
      first.gather = {matrix(rows), rows.cols, sort.token_of_row};
    } else {
      sort.sorted = sorted.mutable_data_ptr();
      first.gemm.a = {sort.sorted, rows.cols};
    }
  }
  for (GroupedProblem* problem : {&first, &second}) {
    problem->blocks = {sort.codes, sort.count};
    problem->fitted = {sort.tiles, sort.tile_count};
  }
  if (limit) first.limits.limit = static_cast<float>(*limit);
  first.limits.up_offset = static_cast<float>(up_offset);
  first.gemm.out.data = hidden.mutable_data_ptr();
  second.gemm.a = {hidden.mutable_data_ptr(), first.gemm.n};
  second.gemm.epilogue.activation = static_cast<int64_t>(Activation::kLinear);
  second.gemm.out.data = results.mutable_data_ptr();
  second.gemm.ctas_before = device.multiprocessors;  // a GEMM precedes it; its size does not matter here
  const WeightedSum sum{routes,
                        results.const_data_ptr(),
                        sort.row_of_slot,
                        weights.const_data_ptr(),
                        weight_type(weights),
                        out.mutable_data_ptr(),
                        static_cast<int>(second.gemm.n),
                        dtype,
                        residual ? Matrix{residual->mutable_data_ptr(), residual->stride(0)} : kNoMatrix};
  const cudaStream_t stream = current_stream(x);
  // With few slots, only the factors of their experts.
  const bool of_slots = !sorts && routes.slots() < routes.experts;
  std::pair<RankFactors, RankFactors> ranked;
  if (adapters.any() && routes.slots() > 0) ranked = adapters.for_forward(of_slots, stream);
  if (sorts) check(launch_row_sort(sort, device, stream));
  const auto launch = [&](const GroupedProblem& problem) {
    if (routes.slots() > 0) check(chosen.kernels.launch(problem, chosen.kernels.plan(problem, device), device, stream));
  };
  // An adapter's rows, computed from a layer's input: the low-rank term is part of the layer's product.
  const auto rank_rows = [&](const RankFactors& factors, GroupedProblem& layer, int parts, bool in_turns) {
    if (!factors) return Tensor();
    GroupedProblem p = ExpertLayer{*factors.a, {}, 1, false, false}.problem(routes, dtype, layer.slots_of_row);
    const Tensor made = new_dense(x, {slots, p.gemm.n});
    p.of_slots = of_slots;
    p.gemm.a = layer.gemm.a;
    p.gemm.epilogue.activation = static_cast<int64_t>(Activation::kLinear);
    p.gemm.ctas_before = layer.gemm.ctas_before;
    p.gemm.out.data = made.mutable_data_ptr();
    p.blocks = layer.blocks;
    p.fitted = layer.fitted;
    launch(p);
    add_term(layer, made, *factors.b, parts, in_turns);
    layer.gemm.ctas_before = device.multiprocessors;
    return made;
  };
  const Tensor first_rows = rank_rows(ranked.first, first, gated ? 2 : 1, interleaved);
  launch(first);
  const Tensor second_rows = rank_rows(ranked.second, second, 1, false);
  launch(second);
  check(launch_sum(sum, device, stream));
  return out;
}

}  // namespace

Tensor experts_mlp(const Tensor& x, const Tensor& top_k_index, const Tensor& top_k_weights,
                   const Tensor& gate_up_weight, const Tensor& down_weight, const OptionalTensor& gate_up_bias,
                   const OptionalTensor& down_bias, int64_t activation, bool gated, bool interleaved, bool transposed,
                   std::optional<double> limit, double up_offset) {
  return compute_experts({}, {}, x, top_k_index, top_k_weights, gate_up_weight, down_weight, gate_up_bias, down_bias,
                         {}, {}, activation, gated, interleaved, transposed, limit, up_offset);
}

void experts_into(const Tensor& out, const OptionalTensor& residual, const Tensor& x, const Tensor& top_k_index,
                  const Tensor& top_k_weights, const Tensor& gate_up_weight, const Tensor& down_weight,
                  const OptionalTensor& gate_up_bias, const OptionalTensor& down_bias, int64_t activation, bool gated,
                  bool interleaved, bool transposed, std::optional<double> limit, double up_offset) {
  compute_experts(out, residual, x, top_k_index, top_k_weights, gate_up_weight, down_weight, gate_up_bias, down_bias,
                  {}, {}, activation, gated, interleaved, transposed, limit, up_offset);
}

Tensor adapted_experts(const Tensor& x, const Tensor& top_k_index, const Tensor& top_k_weights,
                       const Tensor& gate_up_weight, const Tensor& down_weight, const OptionalTensor& gate_up_bias,
                       const OptionalTensor& down_bias, const std::vector<OptionalTensor>& factors,
                       const std::vector<double>& scalings, int64_t activation, bool gated, bool interleaved,
                       bool transposed, std::optional<double> limit, double up_offset) {
  return compute_experts({}, {}, x, top_k_index, top_k_weights, gate_up_weight, down_weight, gate_up_bias, down_bias,
                         factors, scalings, activation, gated, interleaved, transposed, limit, up_offset);
}

std::string plan_experts(const Tensor& x, const Tensor& gate_up_weight, const Tensor& down_weight, int64_t top_k,
                         bool transposed, bool trained) {
  STD_TORCH_CHECK(x.dim() == 2 && top_k > 0 && x.size(0) > 0,
                  "x must be [tokens, in] and not empty, and top_k positive");
  check_size(x.size(0) * top_k, gate_up_weight.size(0));
  const Routes routes{nullptr, 8, static_cast<int>(x.size(0)), static_cast<int>(top_k),
                      static_cast<int>(gate_up_weight.size(0))};
  const int parts = gate_up_weight.size(transposed ? 2 : 1) == down_weight.size(transposed ? 1 : 2) ? 1 : 2;
  PlanRecord record;
  const DType dtype = dtype_of(x, "x");
  const GroupedProblem first = ExpertLayer{gate_up_weight, {}, parts, false, transposed}.problem(routes, dtype, 1);
  const GroupedProblem second = ExpertLayer{down_weight, {}, 1, false, transposed}.problem(routes, dtype, 1);
  const ExpertKernels chosen = trained ? ExpertKernels::of_training(x) : ExpertKernels::of(x, first, false);
  const Gpu& device = chosen.gpu;
  const Architecture& own = *architecture_of(device);
  const auto decide = trained ? own.grouped->decide_training : own.grouped->decide;
  const bool is_ours = forces_experts() || decide == nullptr;
  const Refusal refusal = is_ours ? Refusal::kNone : decide(first, second, device);
  for (const GroupedProblem* problem : {&first, &second}) {
    if (refusal != Refusal::kNone) {
      record.layer().set("implementation", "torch").set("refusal", code(refusal));
      continue;
    }
    const GroupedPlan plan = trained ? chosen.kernels.plan_training(routes) : chosen.kernels.plan(*problem, device);
    record.layer()
        .set("implementation", chosen.architecture->name)
        .set("kernel", plan.loop == MainLoop::kTiled ? "grouped_tiled" : "grouped")
        .set("block_m", plan.rows);
    record.set("split_k", plan.split_k);
    if (guesses(own, device)) record.set("basis", "model");
  }
  return record.text();
}

}  // namespace fused_mlp
