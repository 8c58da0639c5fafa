// The memory for rows that are rounded to e4m3, and their products.
#pragma once

#include "../../dense/fused_gemm.h"
#include "../../device.h"
#include "../coded_layer.h"
#include "scaled.h"

namespace fused_mlp {

// Rows of e4m3 and their scales.
class RoundedRows {
 public:
  RoundedRows(int64_t rows, int64_t columns)
      : groups_(ceil_div(columns, kScaledGroup)),
        row_bytes_(groups_ * kScaledGroup),
        stride_(ceil_div(rows, kScaledRows) * kScaledRows),
        bytes_(rows * row_bytes_),
        memory_(bytes_ + groups_ * stride_ * sizeof(float)) {}

  // For the problem's a.
  RoundedRows(const CodedProblem& problem, cudaStream_t stream, bool starts_early = false)
      : RoundedRows(problem.m, problem.k) {
    check(launch_rounding(problem, rows(), starts_early, stream));
  }

  ScaledRows rows() const {
    auto* const data = static_cast<uint8_t*>(memory_.data());
    return {data, reinterpret_cast<float*>(data + bytes_), row_bytes_, stride_};
  }

 private:
  const int64_t groups_, row_bytes_, stride_, bytes_;
  const Scratch memory_;
};

// Multiplies rounded rows into the problem's out.
inline void multiply_rounded(const CodedLayer& layer, const ScaledRows& a, const Gpu& gpu, cudaStream_t stream) {
  const int64_t parts = layer.plan.split > 1 ? layer.plan.split * layer.problem.m * layer.problem.n : 0;
  const Scratch sums(parts * static_cast<int64_t>(sizeof(float)));
  check(launch_scaled(layer.problem, layer.plan, a, {}, static_cast<float*>(sums.data()), gpu, stream));
}

// Two layers, the hidden values in e4m3; false if a layer does not support that. The problems have a and out.
inline bool launch_with_rounded_hidden(const CodedLayer& first, const CodedLayer& second, const Gpu& gpu,
                                       cudaStream_t stream) {
  if (!first.runs(CodedLoop::kScaled) || first.plan.split > 1 || !second.runs(CodedLoop::kScaled)) return false;
  const RoundedRows rounded(first.problem, stream), hidden(first.problem.m, first.problem.n);
  check(launch_scaled(first.problem, first.plan, rounded.rows(), hidden.rows(), nullptr, gpu, stream));
  multiply_rounded(second, hidden.rows(), gpu, stream);
  return true;
}

}  // namespace fused_mlp
