// The memory for rows that are rounded to e4m3.
#pragma once

#include "../../dense/fused_gemm.h"
#include "../../device.h"
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

}  // namespace fused_mlp
