#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>

// A record of how a call would be computed, from which `explain` is made. backends/native.py reads the record and puts
// it into words.
namespace fused_mlp {

// The reason why torch's GEMM computes a layer, and not a kernel that applies its whole epilogue.
enum class Refusal {
  kNone,
  kGpu,
  kInstructionSet,
  kFloat32,
  kEmpty,
  kTooLarge,
  kOddFeatures,
  kUnalignedRows,
  kColumnMajorWeight,
  kStridedBias,
  kUnalignedBias,
  kTorchIsFaster,
  kTorchByModel,
  kLowRank,
  kManyRows,
};

constexpr const char* kRefusalCodes[] = {
    "none",
    "gpu",
    "instruction_set",
    "float32",
    "empty",
    "too_large",
    "odd_features",
    "unaligned_rows",
    "column_major_weight",
    "strided_bias",
    "unaligned_bias",
    "torch_is_faster",
    "torch_by_model",
    "low_rank",
    "many_rows",
};
static_assert(std::size(kRefusalCodes) == static_cast<size_t>(Refusal::kManyRows) + 1, "one code per refusal");

constexpr const char* code(Refusal refusal) { return kRefusalCodes[static_cast<size_t>(refusal)]; }

// The plan of a call as JSON: a list with one object per layer. Values are numbers and plain names.
class PlanRecord {
 public:
  PlanRecord& layer() {
    text_ += text_.empty() ? "[{" : "}, {";
    first_ = true;
    return *this;
  }
  PlanRecord& set(const char* key, const char* value) {
    return append(key, std::string("\"").append(value).append("\""));
  }
  PlanRecord& set(const char* key, int64_t value) { return append(key, std::to_string(value)); }
  std::string text() const { return text_ + "}]"; }

 private:
  PlanRecord& append(const char* key, const std::string& value) {
    text_.append(first_ ? "\"" : ", \"").append(key).append("\": ").append(value);
    first_ = false;
    return *this;
  }

  std::string text_;
  bool first_ = true;
};

}  // namespace fused_mlp
