// The experts of a mixture. Their tokens are sorted by expert. Blocks of tokens go through both layers on AMX tiles, or
// through torch's GEMMs with the pointwise kernels between. Then every token's results are added up.
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "../../torch-ext/operands/activation.h"
#include "../../torch-ext/operands/operands.h"
#include "../../torch-ext/operands/tensor_rows.h"
#include "../../torch-ext/ops/plan.h"
#include "../../torch-ext/ops/torch_gemm.h"
#include "../../torch-ext/torch_binding.h"
#include "../amx/amx_gemm.h"
#include "../isa/isa.h"
#include "../pointwise/pointwise.h"
#include "norms.h"

namespace fused_mlp {
namespace {

using torch::headeronly::ScalarType;

// Rows of an expert that share one pass over its weights.
constexpr int64_t kBlockRows = 256;

// The choices of the tokens, sorted by expert. A row is one choice of one token.
struct Routing {
  int64_t top_k;
  std::vector<int64_t> tokens;       // the token of each row
  std::vector<int64_t> row_of_slot;  // the row of each choice, token by token; -1 if skipped
};

// Rows of one expert.
struct Block {
  int64_t expert, begin, rows;
};

// One layer's weights of all experts, with the strides of expert, feature and input in elements.
struct ExpertWeights {
  const Tensor& tensor;
  int64_t features, in_features;
  int64_t expert_stride, feature_stride, in_stride;
  OptionalTensor bias;  // dense

  ExpertWeights(const Tensor& weight, const OptionalTensor& bias, bool transposed)
      : tensor(weight),
        features(weight.size(transposed ? 2 : 1)),
        in_features(weight.size(transposed ? 1 : 2)),
        expert_stride(weight.stride(0)),
        feature_stride(weight.stride(transposed ? 2 : 1)),
        in_stride(in_features <= 1 ? 1 : weight.stride(transposed ? 1 : 2)),
        bias(bias ? OptionalTensor(torch::stable::contiguous(*bias)) : std::nullopt) {}
};

struct Experts {
  ExpertWeights gate_up, down;
  int64_t activation;
  bool gated, interleaved, limited;
  float limit, up_offset;

  int64_t hidden() const { return down.in_features; }
};

template <typename T>
void read(const Tensor& tensor, std::vector<T>& values) {
  const Tensor dense = torch::stable::contiguous(tensor);
  const auto copy = [&](const auto* from) { std::copy(from, from + values.size(), values.begin()); };
  const void* data = dense.const_data_ptr();
  switch (tensor.scalar_type()) {
    case ScalarType::Long:
      return copy(static_cast<const int64_t*>(data));
    case ScalarType::Int:
      return copy(static_cast<const int32_t*>(data));
    case ScalarType::Short:
      return copy(static_cast<const int16_t*>(data));
    case ScalarType::Char:
      return copy(static_cast<const int8_t*>(data));
    case ScalarType::Float:
      return copy(static_cast<const float*>(data));
    case ScalarType::Double:
      return copy(static_cast<const double*>(data));
    case ScalarType::BFloat16:
      return copy(static_cast<const torch::headeronly::BFloat16*>(data));
    case ScalarType::Half:
      return copy(static_cast<const torch::headeronly::Half*>(data));
    default:
      STD_TORCH_CHECK(false, "unsupported routing dtype ", torch::headeronly::toString(tensor.scalar_type()));
  }
}

// Sorts the choices by expert, and divides those of each expert into blocks.
std::vector<Block> route(const Tensor& top_k_index, int64_t experts, Routing& routing) {
  std::vector<int64_t> index(top_k_index.numel());
  read(top_k_index, index);
  std::vector<int64_t> ends(experts + 1, 0);
  const auto names_one = [&](int64_t expert) { return expert >= 0 && expert < experts; };
  for (const int64_t expert : index) {
    if (names_one(expert)) ++ends[expert + 1];
  }
  std::partial_sum(ends.begin(), ends.end(), ends.begin());
  std::vector<Block> blocks;
  for (int64_t expert = 0; expert < experts; ++expert) {
    const int64_t rows = ends[expert + 1] - ends[expert], parts = ceil_div(rows, kBlockRows);
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t begin = rows * part / parts, end = rows * (part + 1) / parts;
      blocks.push_back({expert, ends[expert] + begin, end - begin});
    }
  }
  routing.tokens.resize(ends[experts]);
  routing.row_of_slot.assign(index.size(), -1);
  for (size_t slot = 0; slot < index.size(); ++slot) {
    if (!names_one(index[slot])) continue;
    const int64_t row = ends[index[slot]]++;
    routing.tokens[row] = static_cast<int64_t>(slot) / routing.top_k;
    routing.row_of_slot[slot] = row;
  }
  return blocks;
}

// Calls body(unit, thread) for all units; a thread that is done takes the next unit.
template <typename Body>
void for_each_unit(int64_t units, const Body& body) {
  std::atomic<int64_t> next{0};
  const int64_t threads = std::min(units, static_cast<int64_t>(torch::stable::get_num_threads()));
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; ++thread) {
      for (int64_t unit = next++; unit < units; unit = next++) body(unit, thread);
    }
  });
}

float to_float(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}
float to_float(float value) { return value; }

void from_float(float value, float& to) { to = value; }
void from_float(float value, uint16_t& to) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  to = static_cast<uint16_t>((value == value ? rounded : bits | 0x400000u) >> 16);
}

// out[t] = the sum of the rows of token t, each times its weight, in the order of its choices.
template <typename T>
void add_up(const Routing& routing, const std::vector<float>& weights, const T* rows, int64_t features, T* out) {
  constexpr int64_t kColumns = 512;
  const int64_t top_k = routing.top_k, tokens = static_cast<int64_t>(weights.size()) / top_k;
  const int64_t grain = std::max<int64_t>(1, 16384 / std::max<int64_t>(1, features * top_k));
  torch::stable::parallel_for(0, tokens, grain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t c = 0; c < features; c += kColumns) {
        const int64_t count = std::min(kColumns, features - c);
        float sums[kColumns] = {};
        for (int64_t slot = t * top_k; slot < (t + 1) * top_k; ++slot) {
          if (routing.row_of_slot[slot] < 0) continue;
          const T* row = rows + routing.row_of_slot[slot] * features + c;
          const float weight = weights[slot];
          for (int64_t i = 0; i < count; ++i) sums[i] += weight * to_float(row[i]);
        }
        for (int64_t i = 0; i < count; ++i) from_float(sums[i], out[t * features + c + i]);
      }
    }
  });
}

Refusal layout_refusal(const ExpertWeights& weights) {
  return weights.in_stride == 1 || weights.feature_stride == 1 ? Refusal::kNone : Refusal::kColumnMajorWeight;
}

// The reason why the AMX kernels do not support a call.
Refusal tiles_refusal(const Tensor& x, const ExpertWeights& gate_up, const ExpertWeights& down) {
  if (x.scalar_type() != ScalarType::BFloat16) return Refusal::kFloat32;
  if (isa() != Isa::kAmx) return Refusal::kInstructionSet;
  const Refusal refusal = layout_refusal(gate_up);
  return refusal == Refusal::kNone ? layout_refusal(down) : refusal;
}

#if defined(__x86_64__)
// The weights of one expert, from the given feature; every `step`th of them.
amx::Projection projection(const ExpertWeights& weights, int64_t expert, int64_t feature, int64_t step) {
  const uint16_t* weight = static_cast<const uint16_t*>(weights.tensor.const_data_ptr());
  const uint16_t* bias = weights.bias ? static_cast<const uint16_t*>(weights.bias->const_data_ptr()) : nullptr;
  return {weight + expert * weights.expert_stride + feature * weights.feature_stride, weights.feature_stride * step,
          bias ? bias + expert * weights.features + feature : nullptr, weights.in_stride, step};
}

amx::Layer hidden_layer(const Experts& experts, int64_t expert) {
  const int64_t step = experts.interleaved ? 2 : 1;
  amx::Layer layer{projection(experts.gate_up, expert, 0, step),
                   {},
                   experts.gated,
                   experts.gate_up.in_features,
                   experts.hidden(),
                   experts.activation};
  if (experts.gated) layer.up = projection(experts.gate_up, expert, experts.interleaved ? 1 : experts.hidden(), step);
  layer.limited = experts.limited;
  layer.limit = experts.limit;
  layer.up_offset = experts.up_offset;
  return layer;
}

amx::Layer down_layer(const Experts& experts, int64_t expert) {
  return {projection(experts.down, expert, 0, 1),   {}, false, experts.hidden(), experts.down.features,
          static_cast<int64_t>(Activation::kLinear)};
}

// Computes rows [rows, out] on AMX tiles.
void run_tiles(const Tensor& x, const Experts& experts, const Routing& routing, const std::vector<Block>& blocks,
               const Tensor& rows) {
  const TensorRows x_rows(x);
  const uint16_t* x_data = static_cast<const uint16_t*>(x_rows.tensor.const_data_ptr());
  uint16_t* rows_data = static_cast<uint16_t*>(rows.mutable_data_ptr());
  const int64_t in_features = experts.gate_up.in_features, out_features = experts.down.features;
  const int64_t threads = torch::stable::get_num_threads(), count = static_cast<int64_t>(blocks.size());
  int64_t longest = 0;
  for (const Block& block : blocks) longest = std::max(longest, block.rows);

  // With enough blocks each thread takes whole ones through both layers. With few blocks, threads share the panels of
  // each.
  constexpr int64_t kUnitsPerThread = 4;
  const bool whole = count >= 2 * threads;
  const int64_t slots = whole ? threads : count;
  const int64_t in_size = amx::packed_size(longest, in_features);
  const int64_t hidden_size = amx::packed_size(longest, experts.hidden());
  const amx::Layer some = hidden_layer(experts, 0), some_down = down_layer(experts, 0);
  const int64_t sums_size = std::max(amx::scratch_size(some, longest), amx::scratch_size(some_down, longest));
  const Tensor workspace = new_dense(x, {slots * (in_size + hidden_size) + threads * sums_size * 2});
  uint16_t* const packed_in = static_cast<uint16_t*>(workspace.mutable_data_ptr());
  uint16_t* const packed_hidden = packed_in + slots * in_size;
  float* const sums = reinterpret_cast<float*>(packed_hidden + slots * hidden_size);

  const auto pack = [&](const Block& block, int64_t slot) {
    amx::pack_tokens(x_data, x_rows.row_stride, block.rows, in_features, packed_in + slot * in_size,
                     routing.tokens.data() + block.begin);
  };
  const auto first = [&](const Block& block, int64_t slot, int64_t thread, int64_t share, int64_t shares) {
    const amx::Layer layer = hidden_layer(experts, block.expert);
    const int64_t panels = layer.panels();
    amx::project(layer, packed_in + slot * in_size, block.rows, panels * share / shares, panels * (share + 1) / shares,
                 sums + thread * sums_size, {packed_hidden + slot * hidden_size, 0});
  };
  const auto second = [&](const Block& block, int64_t slot, int64_t thread, int64_t share, int64_t shares) {
    const amx::Layer layer = down_layer(experts, block.expert);
    const int64_t panels = layer.panels();
    amx::project(layer, packed_hidden + slot * hidden_size, block.rows, panels * share / shares,
                 panels * (share + 1) / shares, sums + thread * sums_size,
                 {rows_data + block.begin * out_features, out_features});
  };
  if (whole) {
    for_each_unit(count, [&](int64_t b, int64_t thread) {
      pack(blocks[b], thread);
      first(blocks[b], thread, thread, 0, 1);
      second(blocks[b], thread, thread, 0, 1);
    });
  } else {
    const int64_t shares = ceil_div(kUnitsPerThread * threads, count);
    for_each_unit(count, [&](int64_t b, int64_t) { pack(blocks[b], b); });
    for_each_unit(count * shares, [&](int64_t unit, int64_t thread) {
      first(blocks[unit / shares], unit / shares, thread, unit % shares, shares);
    });
    for_each_unit(count * shares, [&](int64_t unit, int64_t thread) {
      second(blocks[unit / shares], unit / shares, thread, unit % shares, shares);
    });
  }
}
#endif

Tensor view_at(const Tensor& tensor, std::array<int64_t, 2> sizes, std::array<int64_t, 2> strides, int64_t offset) {
  AtenTensorHandle view = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(tensor.get(), 2, sizes.data(), strides.data(), offset, &view));
  return Tensor(view);
}

// out [rows, features] = in [rows, in] times the weights of one expert, plus its bias.
void multiply(const Tensor& out, const Tensor& in, const ExpertWeights& weights, int64_t expert) {
  const Tensor columns = view_at(weights.tensor, {weights.in_features, weights.features},
                                 {weights.in_stride, weights.feature_stride}, expert * weights.expert_stride);
  if (!weights.bias) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_mm_out(out.get(), in.get(), columns.get()));
    return;
  }
  const Tensor bias = view_at(*weights.bias, {1, weights.features}, {weights.features, 1}, expert * weights.features);
  TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_addmm_out(out.get(), bias.get(), in.get(), columns.get(), 1.0, 1.0));
}

// Separates gates and ups [rows, 2 * hidden] into halves, and applies their limits.
template <typename T>
void prepare_gates(const Experts& experts, int64_t rows, T* gate_up, T* scratch) {
  const int64_t hidden = experts.hidden();
  for (int64_t r = 0; r < rows; ++r) {
    T* row = gate_up + r * 2 * hidden;
    if (experts.interleaved) {
      std::copy(row, row + 2 * hidden, scratch);
      for (int64_t i = 0; i < hidden; ++i) row[i] = scratch[2 * i], row[hidden + i] = scratch[2 * i + 1];
    }
    if (!experts.limited) continue;
    const float limit = experts.limit;
    for (int64_t i = 0; i < hidden; ++i) {  // NaN stays NaN
      const float gate = to_float(row[i]), up = to_float(row[hidden + i]);
      const float bounded = up > limit ? limit : up < -limit ? -limit : up;
      from_float(gate > limit ? limit : gate, row[i]);
      from_float(bounded + experts.up_offset, row[hidden + i]);
    }
  }
}

// Computes rows [rows, out] with torch's GEMMs.
void run_gemms(const Tensor& x, DType dtype, const Experts& experts, const Routing& routing,
               const std::vector<Block>& blocks, const Tensor& rows) {
  const TensorRows x_rows(x);
  const int64_t bytes = element_bytes(dtype), in_features = experts.gate_up.in_features;
  const int64_t hidden = experts.hidden(), gates = experts.gate_up.features, out_features = experts.down.features;
  const int64_t threads = torch::stable::get_num_threads(), count = static_cast<int64_t>(blocks.size());
  int64_t longest = 0;
  for (const Block& block : blocks) longest = std::max(longest, block.rows);
  struct Buffers {
    Tensor in, gates, hidden, scratch;
  };
  const auto run = [&](const Block& block, const Buffers& buffers) {
    char* in = static_cast<char*>(buffers.in.mutable_data_ptr());
    const char* from = static_cast<const char*>(x_rows.tensor.const_data_ptr());
    for (int64_t r = 0; r < block.rows; ++r) {
      const int64_t token = routing.tokens[block.begin + r];
      std::memcpy(in + r * in_features * bytes, from + token * x_rows.row_stride * bytes, in_features * bytes);
    }
    const auto head = [&](const Tensor& buffer, int64_t features) {
      return view_at(buffer, {block.rows, features}, {features, 1}, 0);
    };
    multiply(head(buffers.gates, gates), head(buffers.in, in_features), experts.gate_up, block.expert);
    char* gate_up = static_cast<char*>(buffers.gates.mutable_data_ptr());
    void* scratch = buffers.scratch.mutable_data_ptr();
    const PointwiseShape shape{dtype, block.rows, hidden};
    const Matrix values{buffers.hidden.mutable_data_ptr(), hidden};
    if (!experts.gated) {
      pointwise().act(shape, experts.activation, {gate_up, hidden}, values);
    } else {
      if (dtype == DType::kFloat32) {
        prepare_gates(experts, block.rows, reinterpret_cast<float*>(gate_up), static_cast<float*>(scratch));
      } else {
        prepare_gates(experts, block.rows, reinterpret_cast<uint16_t*>(gate_up), static_cast<uint16_t*>(scratch));
      }
      pointwise().act_and_mul(shape, experts.activation, {gate_up, gates}, {gate_up + hidden * bytes, gates}, values);
    }
    const Tensor out = view_at(rows, {block.rows, out_features}, {out_features, 1}, block.begin * out_features);
    multiply(out, head(buffers.hidden, hidden), experts.down, block.expert);
  };
  const bool side_by_side = count >= threads;  // otherwise torch divides every product among the threads
  std::vector<Buffers> buffers;
  for (int64_t thread = 0; thread < (side_by_side ? threads : 1); ++thread) {
    buffers.push_back({new_dense(x, {longest, in_features}), new_dense(x, {longest, gates}),
                       new_dense(x, {longest, hidden}), new_dense(x, {gates})});
  }
  if (side_by_side) {
    for_each_unit(count, [&](int64_t b, int64_t thread) { run(blocks[b], buffers[thread]); });
  } else {
    for (const Block& block : blocks) run(block, buffers[0]);
  }
}

}  // namespace

Tensor experts_mlp(const Tensor& x, const Tensor& top_k_index, const Tensor& top_k_weights,
                   const Tensor& gate_up_weight, const Tensor& down_weight, const OptionalTensor& gate_up_bias,
                   const OptionalTensor& down_bias, int64_t activation, bool gated, bool interleaved, bool transposed,
                   std::optional<double> limit, double up_offset) {
  check_experts(x, top_k_index, top_k_weights, gate_up_weight, down_weight, gate_up_bias, down_bias, activation, gated,
                interleaved, transposed, limit, up_offset);
  const Experts experts{ExpertWeights(gate_up_weight, gate_up_bias, transposed),
                        ExpertWeights(down_weight, down_bias, transposed),
                        activation,
                        gated,
                        interleaved,
                        limit || up_offset != 0,
                        limit ? static_cast<float>(*limit) : std::numeric_limits<float>::infinity(),
                        static_cast<float>(up_offset)};
  const ScalarType type = x.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16,
                  "x must be float32 or bfloat16 on the CPU, not ", torch::headeronly::toString(type));
  const DType dtype = type == ScalarType::Float ? DType::kFloat32 : DType::kBFloat16;

  const int64_t features = experts.down.features;
  const Tensor out = new_dense(x, {x.size(0), features});
  if (out.numel() == 0) return out;
  Routing routing{top_k_index.size(1), {}, {}};
  const std::vector<Block> blocks =
      routing.top_k == 0 ? std::vector<Block>{} : route(top_k_index, gate_up_weight.size(0), routing);
  if (blocks.empty()) {
    std::memset(out.mutable_data_ptr(), 0, out.numel() * element_bytes(dtype));
    return out;
  }
  const Tensor rows = new_dense(x, {static_cast<int64_t>(routing.tokens.size()), features});
#if defined(__x86_64__)
  if (tiles_refusal(x, experts.gate_up, experts.down) == Refusal::kNone) {
    run_tiles(x, experts, routing, blocks, rows);
  } else
#endif
  {
    run_gemms(x, dtype, experts, routing, blocks, rows);
  }
  std::vector<float> weights(top_k_weights.numel());
  read(top_k_weights, weights);
  if (dtype == DType::kFloat32) {
    add_up(routing, weights, static_cast<const float*>(rows.const_data_ptr()), features,
           static_cast<float*>(out.mutable_data_ptr()));
  } else {
    add_up(routing, weights, static_cast<const uint16_t*>(rows.const_data_ptr()), features,
           static_cast<uint16_t*>(out.mutable_data_ptr()));
  }
  return out;
}

void experts_into(const Tensor& out, const OptionalTensor& residual, const Tensor& x, const Tensor& top_k_index,
                  const Tensor& top_k_weights, const Tensor& gate_up_weight, const Tensor& down_weight,
                  const OptionalTensor& gate_up_bias, const OptionalTensor& down_bias, int64_t activation, bool gated,
                  bool interleaved, bool transposed, std::optional<double> limit, double up_offset) {
  const Tensor made = experts_mlp(x, top_k_index, top_k_weights, gate_up_weight, down_weight, gate_up_bias, down_bias,
                                  activation, gated, interleaved, transposed, limit, up_offset);
  const DType dtype = x.scalar_type() == ScalarType::Float ? DType::kFloat32 : DType::kBFloat16;
  if (!residual) {
    std::memcpy(out.mutable_data_ptr(), made.const_data_ptr(), made.numel() * element_bytes(dtype));
    return;
  }
  const int64_t cols = made.size(1);
  const Norm sum{NormKind::kNone, kNoFeatures, kNoFeatures, 0.0f, Residual::kAdded, 1.0f};
  norm_rows({dtype, made.size(0), cols}, sum, {made.mutable_data_ptr(), cols},
            {residual->mutable_data_ptr(), residual->stride(0)}, {out.mutable_data_ptr(), cols});
}

std::string plan_experts(const Tensor& x, const Tensor& gate_up_weight, const Tensor& down_weight, int64_t,
                         bool transposed, bool) {
  const Refusal refusal = tiles_refusal(x, ExpertWeights(gate_up_weight, std::nullopt, transposed),
                                        ExpertWeights(down_weight, std::nullopt, transposed));
  PlanRecord plan;
  for (const bool pointwise : {true, false}) {
    plan.layer().set("implementation", refusal == Refusal::kNone ? "amx" : "torch");
    if (refusal == Refusal::kNone) continue;
    plan.set("refusal", code(refusal));
    if (pointwise) plan.set("pointwise", name(std::min(isa(), Isa::kAvx512)));
  }
  return plan.text();
}

}  // namespace fused_mlp
