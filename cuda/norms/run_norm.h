// Runs a norm's kernel, with the interface that ops use.
#pragma once

#include "../device.h"
#include "norm.h"

namespace fused_mlp {

inline void run_norm(const NormRows& rows, const Gpu& gpu, cudaStream_t stream) {
  check(have_teams(rows) ? launch_team_norm(rows, gpu.multiprocessors, stream) : launch_norm(rows, stream));
}

inline void run_norm(const TensorRows& x, const Matrix& residual, const Norm& norm, const Tensor& out,
                     float* statistics = nullptr, void* sum = nullptr) {
  const Gpu& its = gpu(x.tensor.get_device_index());
  const Matrix results{out.mutable_data_ptr(), x.cols};
  run_norm({matrix(x), residual, results, x.rows, x.cols, dtype_of(x.tensor, "x"), norm, norms_overlap(its.major),
            statistics, sum},
           its, current_stream(x.tensor));
}

}  // namespace fused_mlp
