// A layer with quantised weights, computed by a kernel that reads their codes, or the reason why there is none.
#pragma once

#include <bit>
#include <optional>
#include <span>

#include "../dense/layer.h"
#include "../device.h"
#include "choice.h"
#include "decode/decode.h"

namespace fused_mlp {

// One layer, or gate and up. Biases have adjacent elements, or are null.
struct Part {
  const PackedWeight* first;
  const PackedWeight* up;
  const void *bias, *up_bias;
  int64_t activation;
};

inline CodedScales scales_of(const PackedWeight& weight) {
  if (!weight.nested()) return {weight.scales};
  return {weight.scales, weight.nested_scales, weight.nested_code, weight.nested_block,
          static_cast<float>(weight.offset)};
}

inline const uint8_t* data_of(const PackedWeight& weight) { return static_cast<const uint8_t*>(weight.data); }

// The scales of weights as floats; one kernel converts all nested ones.
class FloatScales {
 public:
  explicit FloatScales(std::span<const PackedWeight* const> weights) : weights_(weights) {}

  void unnest(cudaStream_t stream) {
    NestedScales nested[kMostNested];
    int count = 0;
    for (const PackedWeight* weight : weights_) {
      if (!weight->nested()) continue;
      const int64_t blocks = weight->blocks();
      auto* const floats = static_cast<float*>(unnested_[count].emplace(blocks * sizeof(float)).data());
      nested[count++] = {scales_of(*weight), blocks, floats};
    }
    if (count > 0) check(launch_unnest(nested, stream));
  }

  // The scales of one of the weights; null if they are nested and not converted yet.
  const float* of(const PackedWeight* weight) const {
    if (!weight->nested()) return static_cast<const float*>(weight->scales);
    int place = 0;
    for (const PackedWeight* other : weights_) {
      if (other == weight) break;
      place += other->nested();
    }
    return unnested_[place] ? static_cast<const float*>(unnested_[place]->data()) : nullptr;
  }

 private:
  std::span<const PackedWeight* const> weights_;
  std::optional<Scratch> unnested_[kMostNested];
};

// Gate and up are two products if their formats, their code tables or their blocks differ.
inline bool shares_format(const Part& part) {
  if (part.up == nullptr) return true;
  const PackedWeight &gate = *part.first, &up = *part.up;
  return gate.coding == up.coding && gate.code == up.code && gate.block_rows == up.block_rows &&
         gate.block == up.block && gate.factor() == up.factor() &&
         (!gate.in_tiles() || gate.nested_block == up.nested_block);
}

// The number of blocks of kCodedBlock elements of k that share a scale, as a power of two; nothing if kernels cannot
// read them.
inline std::optional<int> scale_shift(const PackedWeight& weight) {
  if (weight.blocked() && weight.block >= weight.k) return 31;
  const auto blocks = static_cast<uint64_t>(weight.block / kCodedBlock);
  if (weight.block % kCodedBlock != 0 || !std::has_single_bit(blocks) || (blocks > 1 && !weight.blocked())) return {};
  return std::countr_zero(blocks);
}

struct CodedLayer {
  CodedProblem problem{};
  CodedPlan plan{};
  Refusal refusal;

  CodedLayer(const Part& part, const FloatScales& scales, const Matrix& a, int64_t rows, DType dtype, const Gpu& gpu)
      : refusal(choose(part, scales, a, rows, dtype, gpu)) {}

  bool fused() const { return refusal == Refusal::kNone; }
  bool runs(CodedLoop loop) const { return fused() && plan.loop == loop; }

  // Uses the converted scales, once they exist.
  void take(const Part& part, const FloatScales& scales) {
    problem.weight.scales = scales.of(part.first);
    if (part.up != nullptr) problem.up_weight.scales = scales.of(part.up);
  }

 private:
  Refusal choose(const Part& part, const FloatScales& scales, const Matrix& a, int64_t rows, DType dtype,
                 const Gpu& gpu) {
    const auto described = [&](const PackedWeight* weight) {
      const int64_t stride = weight->in_tiles()  ? Tiles(*weight).n
                             : weight->blocked() ? weight->blocks_of_row()
                                                 : weight->k / kCodedBlock;
      const auto scale_rows = static_cast<int>(std::min<int64_t>(weight->block_rows, weight->n));
      return CodedWeight{data_of(*weight), weight->code,    scales.of(weight),
                         stride,           scale_rows,      scale_shift(*weight).value_or(0),
                         weight->factor(), Tiles(*weight).k};
    };
    const PackedWeight& weight = *part.first;
    if (!scale_shift(weight) || (part.up != nullptr && !scale_shift(*part.up))) return Refusal::kOddFeatures;
    if (weight.n == 0) return Refusal::kEmpty;
    problem = {weight.coding, a, described(part.first), {}, {nullptr, weight.n}, rows, weight.n, weight.k, dtype, {},
               false};
    problem.epilogue.activation = part.activation;
    problem.epilogue.bias = part.bias;
    if (part.up != nullptr) {
      problem.up_weight = described(part.up);
      problem.epilogue.up_bias = part.up_bias;
    }
    return choose_coded(problem, gpu, &plan);
  }
};

}  // namespace fused_mlp
