#include "refusal.h"

#include <limits>

namespace fused_mlp {
namespace {

bool aligned(const void* pointer, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

}  // namespace

Refusal refusal_of_operands(const GemmProblem& p) {
  constexpr int64_t kMaxExtent = std::numeric_limits<int32_t>::max() - 1024;  // coordinates of tiles are 32-bit
  if (p.dtype == DType::kFloat32) return Refusal::kFloat32;
  if (p.m == 0 || p.n == 0 || p.k == 0) return Refusal::kEmpty;
  if (p.m > kMaxExtent || p.n > kMaxExtent || p.k > kMaxExtent) return Refusal::kTooLarge;
  if (p.n % 8 != 0 || p.k % 8 != 0) return Refusal::kOddFeatures;
  const auto addressable = [](const Matrix& matrix, int64_t cols) {
    return aligned(matrix.data, 16) && matrix.row_stride % 8 == 0 && matrix.row_stride >= cols;
  };
  const int64_t weight_cols = reads_weights_as_they_lie(p.product()) ? p.n : p.k;
  const auto absent_or_addressable = [&](const Matrix& matrix, int64_t cols) {
    return matrix.data == nullptr || addressable(matrix, cols);
  };
  const TrainingMatrices& t = p.training;
  if (!addressable(p.a, p.k) || !addressable(p.weight, weight_cols) || (p.gated() && !addressable(p.up_weight, p.k)) ||
      !addressable(p.out, p.n) || !absent_or_addressable(t.second_a, p.k) ||
      !absent_or_addressable(t.second_weight, p.n) || !absent_or_addressable(t.third_a, p.k) ||
      !absent_or_addressable(t.third_weight, p.n) || !absent_or_addressable(t.gate, p.n) ||
      !absent_or_addressable(t.up, p.n)) {
    return Refusal::kUnalignedRows;
  }
  const LowRank& r = p.low_rank;
  const bool lies = reads_weights_as_they_lie(p.product());
  if (!absent_or_addressable(r.rows, r.columns()) || !absent_or_addressable(r.factor, p.k) ||
      !absent_or_addressable(r.weight, lies ? p.n : r.k) || !absent_or_addressable(r.up_weight, lies ? p.n : r.up_k)) {
    return Refusal::kUnalignedRows;
  }
  if (!aligned(p.epilogue.bias, 4) || !aligned(p.epilogue.up_bias, 4)) return Refusal::kUnalignedBias;
  return Refusal::kNone;
}

}  // namespace fused_mlp
