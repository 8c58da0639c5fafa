// The experts of a mixture with quantised weights on a GPU: two grouped GEMMs that read codes, and a weighted sum. Rows
// are sorted only by lists: the first layer reads the tokens' rows from their original places.
#include <torch/csrc/stable/ops.h>

#include <bit>
#include <string>

#include "../../torch-ext/operands/activation.h"
#include "../../torch-ext/operands/operands.h"
#include "../../torch-ext/ops/plan.h"
#include "../gemm/choice/usual.h"
#include "../quantized/grouped/grouped.h"
#include "../quantized/scaled/rounded_rows.h"
#include "expert_operands.h"

namespace fused_mlp {

namespace {

// Weights [experts, rows, k] as passed by the caller: codes, scales, and for FP8 the rows and columns of a block.
struct GivenStack {
  const Tensor &data, &scales;
  int64_t experts, rows, k, block_rows, block;

  // `layout` is defined in torch_binding.h.
  GivenStack(const Tensor& data, const Tensor& scales, const std::vector<int64_t>& layout, size_t first)
      : data(data),
        scales(scales),
        experts(layout.at(first)),
        rows(layout.at(first + 1)),
        k(layout.at(first + 2)),
        block_rows(layout.at(first + 3)),
        block(layout.at(first + 4)) {
    STD_TORCH_CHECK(experts > 0 && rows >= 0 && k >= 0 && block_rows > 0 && block > 0 && (fp8() || block == kMxBlock),
                    "layout must be [experts, out, in, block_rows, block] with positive blocks");
    STD_TORCH_CHECK(fp8() || k % kMxBlock == 0, "MXFP4 weights must have in a multiple of ", kMxBlock);
    check(data, fp8() ? ScalarType::Float8_e4m3fn : ScalarType::Byte, experts * rows * k / (fp8() ? 1 : 2), "data");
    check(scales, fp8() ? ScalarType::Float : ScalarType::Byte, experts * scales_of_expert(), "scales");
  }

  bool fp8() const { return data.scalar_type() == ScalarType::Float8_e4m3fn; }
  int64_t scales_of_row() const { return ceil_div(k, block); }
  int64_t scales_of_expert() const { return ceil_div(rows, block_rows) * scales_of_row(); }

  CodedStack coded() const {
    const auto blocks = static_cast<uint64_t>(block / kCodedBlock);
    const bool whole = block >= k;
    const bool power = whole || (block % kCodedBlock == 0 && std::has_single_bit(blocks));
    STD_TORCH_CHECK(!fp8() || power, "blocks must span all columns or a power of two of at least ", kCodedBlock);
    STD_TORCH_CHECK(k > 0 && k % kCodedBlock == 0, "inputs must be a multiple of ", kCodedBlock);
    STD_TORCH_CHECK(aligned(data) && reinterpret_cast<uintptr_t>(scales.const_data_ptr()) % 4 == 0,
                    "quantised weights must be aligned");
    constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
    STD_TORCH_CHECK(rows * k < kMost && experts * scales_of_expert() < kMost, "quantised weights are too large");
    return {fp8() ? StackCoding::kFp8 : StackCoding::kMxfp4,
            static_cast<const uint8_t*>(data.const_data_ptr()),
            scales.const_data_ptr(),
            rows,
            scales_of_expert(),
            scales_of_row(),
            static_cast<int>(std::min(block_rows, rows)),
            !fp8() || whole ? 31 : std::countr_zero(blocks)};
  }

 private:
  static void check(const Tensor& tensor, ScalarType dtype, int64_t elements, const char* name) {
    STD_TORCH_CHECK(tensor.scalar_type() == dtype && tensor.is_contiguous() && tensor.numel() == elements, name,
                    " of quantised weights must be ", elements, " contiguous elements of the dtype of its format");
  }
};

constexpr size_t kLayout = 5;  // numbers per stack

// A layer of `parts` matrices, with their features concatenated or interleaved.
CodedExperts layer_of(const GivenStack& weight, const OptionalTensor& bias, int parts, bool in_turns,
                      const Routes& routes, int slots_of_row) {
  CodedExperts made{};
  made.weight = weight.coded();
  made.gated = parts == 2;
  GroupedProblem& p = made.layer;
  const int64_t n = weight.rows / parts;
  STD_TORCH_CHECK(weight.rows % parts == 0 && n > 0 && n % 8 == 0, "features must be multiples of 8");
  p.gemm = {.m = routes.slots(), .n = n, .k = weight.k, .dtype = DType::kBFloat16};
  p.gemm.out.row_stride = n;
  p.routes = routes;
  p.slots_of_row = slots_of_row;
  p.interleaved = in_turns;
  p.limits = {std::numeric_limits<float>::infinity(), 0.0f};
  if (!bias) return made;
  const ScalarType type = bias->scalar_type();
  STD_TORCH_CHECK((type == ScalarType::Float || type == ScalarType::BFloat16) && bias->dim() == 2 &&
                      bias->size(0) == weight.experts && bias->size(1) == weight.rows &&
                      bias->device() == weight.data.device(),
                  "biases must be [experts, out], in the dtype of x or in float32, on its device");
  made.float_bias = type == ScalarType::Float;
  p.bias_stride = bias->stride(0);
  p.bias_step = bias->stride(1) * (in_turns ? parts : 1);
  const auto* const first = static_cast<const char*>(bias->const_data_ptr());
  p.gemm.epilogue.bias = first;
  if (parts == 2) {
    p.gemm.epilogue.up_bias = first + (in_turns ? 1 : n) * bias->stride(1) * (made.float_bias ? 4 : 2);
  }
  return made;
}

// A layer for kernels that round rows to e4m3. Its weights have one scale per block, of at least 128 x 128.
CodedProblem scaled_layer_of(const GivenStack& weight, int parts, int64_t rows) {
  const CodedStack coded = weight.coded();
  const int64_t n = weight.rows / parts;
  const bool whole = coded.scale_rows % kScaledTile == 0 || coded.scale_rows >= weight.rows;
  STD_TORCH_CHECK(weight.fp8() && whole && kCodedBlock << std::min(coded.scale_shift, 16) >= kScaledGroup &&
                      (parts == 1 || n % coded.scale_rows == 0 || coded.scale_rows >= weight.rows),
                  "rounding rows requires FP8 weights whose blocks are multiples of ", kScaledTile, " x ",
                  kScaledGroup);
  STD_TORCH_CHECK(weight.rows % parts == 0 && n > 0 && n % 8 == 0, "features must be multiples of 8");
  const auto* const scales = static_cast<const float*>(coded.scales);
  CodedProblem p{};
  p.coding = Coding::kFp8;
  p.weight = {coded.data, nullptr, scales, coded.scale_stride, coded.scale_rows, coded.scale_shift};
  if (parts == 2) {
    p.up_weight = p.weight;
    p.up_weight.data += n * weight.k;
    p.up_weight.scales += n / coded.scale_rows * coded.scale_stride;
  }
  p.m = rows;
  p.n = n;
  p.k = weight.k;
  p.dtype = DType::kBFloat16;
  p.epilogue.activation = static_cast<int64_t>(Activation::kLinear);
  return p;
}

// Both layers on rows sorted into blocks of kScaledTile. Rows of x are rounded to e4m3 while they are sorted; hidden
// values are rounded too.
void multiply_scaled(const TensorRows& x, const RowSort& sort, int64_t sorted_rows, const GivenStack& gate_up,
                     const GivenStack& down, int parts, int64_t activation, void* results, const Gpu& device,
                     cudaStream_t stream) {
  CodedProblem first = scaled_layer_of(gate_up, parts, sorted_rows), second = scaled_layer_of(down, 1, sorted_rows);
  const auto experts_of = [&](const GivenStack& weight, int layer) {
    return ScaledExperts{.experts = static_cast<int>(weight.experts),
                         .codes = sort.codes,
                         .count = sort.count,
                         .weight_rows = weight.rows,
                         .scales_of_expert = weight.scales_of_expert(),
                         .taken = sort.taken + layer};
  };
  ScaledExperts of_first = experts_of(gate_up, 0);
  of_first.token_of_row = sort.token_of_row;
  CodedProblem rounding = first;
  rounding.a = matrix(x);
  rounding.m = x.rows;
  first.epilogue.activation = activation;
  second.out = {results, second.n};
  const CodedPlan plan{CodedLoop::kScaled, kScaledTile, 2, 1, {}, 1};
  const RoundedRows rows(rounding, stream, true), hidden(sorted_rows, first.n);
  check(launch_scaled(first, plan, rows.rows(), hidden.rows(), nullptr, device, stream, of_first));
  check(launch_scaled(second, plan, hidden.rows(), {}, nullptr, device, stream, experts_of(down, 1)));
}

}  // namespace

Tensor quantized_experts(const Tensor& x, const Tensor& top_k_index, const Tensor& top_k_weights, const Tensor& gate_up,
                         const Tensor& gate_up_scales, const Tensor& down, const Tensor& down_scales,
                         const std::vector<int64_t>& layouts, const OptionalTensor& gate_up_bias,
                         const OptionalTensor& down_bias, int64_t activation, bool gated, bool interleaved,
                         std::optional<double> limit, double up_offset, bool many_rows) {
  check_activation(activation);
  STD_TORCH_CHECK(layouts.size() == 2 * kLayout, "layouts must have ", kLayout, " numbers per weight");
  const GivenStack first_weight(gate_up, gate_up_scales, layouts, 0),
      second_weight(down, down_scales, layouts, kLayout);
  const int64_t hidden = first_weight.rows / (gated ? 2 : 1);
  STD_TORCH_CHECK(x.dim() == 2 && x.scalar_type() == ScalarType::BFloat16 && x.size(1) == first_weight.k,
                  "x must be [tokens, in] in bfloat16 with in = ", first_weight.k);
  STD_TORCH_CHECK(top_k_index.dim() == 2 && top_k_index.size(0) == x.size(0) && top_k_weights.dim() == 2 &&
                      top_k_weights.size(0) == x.size(0) && top_k_weights.size(1) == top_k_index.size(1),
                  "top_k_index and top_k_weights must be [tokens, k]");
  STD_TORCH_CHECK(second_weight.k == hidden && second_weight.experts == first_weight.experts,
                  "down must be [experts, out, hidden] to fit gate_up");
  for (const Tensor* each : {&top_k_index, &top_k_weights, &gate_up, &gate_up_scales, &down, &down_scales}) {
    STD_TORCH_CHECK(each->device() == x.device(), "all operands must be on the device of x");
  }
  check_size(top_k_index.numel(), first_weight.experts);
  const DeviceGuard device_guard(x.get_device_index());
  const Gpu& device = gpu(x.get_device_index());
  const Tensor index = torch::stable::contiguous(top_k_index), weights = torch::stable::contiguous(top_k_weights);
  const Routes routes = routes_of(index, first_weight.experts);
  const Tensor out = new_dense(x, {x.size(0), second_weight.rows});
  if (out.numel() == 0) return out;
  const TensorRows rows = addressable_rows(x);
  const cudaStream_t stream = current_stream(x);
  STD_TORCH_CHECK(!many_rows || (device.major == 9 && device.minor == 0), "many_rows requires a Hopper GPU");
  const bool rounds = many_rows && first_weight.fp8(), fits = many_rows && !rounds;
  GroupedPlan plan = fits ? plan_fitted_stack(routes) : plan_stack(routes);
  if (rounds) {
    STD_TORCH_CHECK(!gate_up_bias && !down_bias && !limit && up_offset == 0.0 && !interleaved,
                    "rounding rows is not supported with biases, limits or interleaved gate and up");
    plan = {MainLoop::kTiled, true, kScaledTile, row_tiles(routes, kScaledTile), 1};
    plan.sorted_rows = plan.row_tiles * kScaledTile;
  }
  const int64_t slots = plan.sorts ? plan.sorted_rows : routes.slots();
  const Tensor results = new_dense(x, {slots, second_weight.rows});
  const Tensor sorted = fits ? new_dense(x, {slots, rows.cols}) : Tensor();
  RowSort sort{routes, matrix(rows), rows.cols, rounds ? kScaledTile : kFittedStep};
  sort.tile_rows = plan.rows;
  const int64_t of_tile = rounds ? sizeof(int) : sizeof(FittedTile);
  const int64_t list_bytes = plan.row_tiles * of_tile + (3 + routes.slots() + slots) * int64_t{sizeof(int)};
  const Scratch lists(plan.sorts ? list_bytes : 0);
  if (plan.sorts) {
    auto* const tiles = static_cast<char*>(lists.data());
    int* const count = reinterpret_cast<int*>(tiles + plan.row_tiles * of_tile);
    if (rounds) {
      sort.codes = reinterpret_cast<int*>(tiles);
      sort.count = count;
    } else {
      sort.tiles = reinterpret_cast<FittedTile*>(tiles);
      sort.tile_count = count;
    }
    sort.row_of_slot = count + 1;
    if (fits) {
      sort.sorted = sorted.mutable_data_ptr();
    } else {
      sort.token_of_row = sort.row_of_slot + routes.slots();
    }
    if (rounds) sort.taken = sort.token_of_row + slots;
    check(launch_row_sort(sort, device, stream));
  }
  const int parts = gated ? 2 : 1;
  if (rounds) {
    multiply_scaled(rows, sort, slots, first_weight, second_weight, parts, activation, results.mutable_data_ptr(),
                    device, stream);
  } else if (routes.slots() > 0) {
    const Tensor hidden_rows = new_dense(x, {slots, hidden});
    CodedExperts first = layer_of(first_weight, gate_up_bias, parts, interleaved, routes, routes.top_k);
    CodedExperts second = layer_of(second_weight, down_bias, 1, false, routes, 1);
    for (CodedExperts* layer : {&first, &second}) layer->layer.fitted = {sort.tiles, sort.tile_count};
    if (plan.sorts && !fits) first.layer.gather = {matrix(rows), rows.cols, sort.token_of_row};
    if (limit) first.layer.limits.limit = static_cast<float>(*limit);
    first.layer.limits.up_offset = static_cast<float>(up_offset);
    first.layer.gemm.a = fits ? Matrix{sort.sorted, rows.cols} : matrix(rows);
    first.layer.gemm.epilogue.activation = activation;
    first.layer.gemm.out.data = hidden_rows.mutable_data_ptr();
    second.layer.gemm.a = {hidden_rows.mutable_data_ptr(), hidden};
    second.layer.gemm.epilogue.activation = static_cast<int64_t>(Activation::kLinear);
    second.layer.gemm.out.data = results.mutable_data_ptr();
    second.layer.gemm.ctas_before = device.multiprocessors;
    const auto launch = fits ? launch_fitted_stack : launch_stack;
    check(launch(first, plan, device, stream));
    check(launch(second, plan, device, stream));
  }
  const WeightedSum sum{routes,
                        results.const_data_ptr(),
                        sort.row_of_slot,
                        weights.const_data_ptr(),
                        weight_type(weights),
                        out.mutable_data_ptr(),
                        static_cast<int>(second_weight.rows),
                        DType::kBFloat16};
  check(launch_sum(sum, device, stream));
  return out;
}

Tensor decoded_experts(const Tensor& data, const Tensor& scales, const std::vector<int64_t>& layout,
                       torch::headeronly::ScalarType dtype) {
  STD_TORCH_CHECK(layout.size() == kLayout, "layout must have ", kLayout, " numbers");
  const GivenStack given(data, scales, layout, 0);
  const DeviceGuard device_guard(data.get_device_index());
  const std::vector<int64_t> sizes{given.experts, given.rows, given.k};
  const Tensor out = new_dense(data, sizes, dtype);
  const StackElements elements{given.fp8() ? StackCoding::kFp8 : StackCoding::kMxfp4,
                               static_cast<const uint8_t*>(data.const_data_ptr()),
                               scales.const_data_ptr(),
                               given.experts,
                               given.rows,
                               given.k,
                               given.block_rows,
                               given.block};
  check(launch_decode(elements, out.mutable_data_ptr(), dtype_of(out, "dtype"), current_stream(out)));
  return out;
}

std::string plan_quantized_experts(const Tensor& x, int64_t top_k, int64_t experts, bool fp8, bool many_rows) {
  STD_TORCH_CHECK(x.dim() == 2 && top_k > 0 && x.size(0) > 0,
                  "x must be [tokens, in] and not empty, and top_k positive");
  check_size(x.size(0) * top_k, experts);
  const Routes routes{nullptr, 8, static_cast<int>(x.size(0)), static_cast<int>(top_k), static_cast<int>(experts)};
  PlanRecord record;
  const bool rounds = many_rows && fp8;
  const GroupedPlan plan = many_rows && !rounds ? plan_fitted_stack(routes) : plan_stack(routes);
  for (int layer = 0; layer < 2; ++layer) {
    record.layer()
        .set("implementation", "quantized")
        .set("kernel", rounds      ? "scaled"
                       : many_rows ? "tiled"
                                   : "streamed");
    record.set("block_m", rounds ? kScaledTile : plan.rows);
    record.set("split_k", 1);
  }
  return record.text();
}

}  // namespace fused_mlp
