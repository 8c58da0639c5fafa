// The ops of attentions: their projections of one input, and rotary embeddings.
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>

#include "../../torch-ext/ops/attention/projections.h"
#include "../../torch-ext/ops/attention/rotated.h"
#include "../dense/training_gemms.h"
#include "rotary.h"

namespace fused_mlp {
namespace {

// The functions that projections.h and rotated.h ask of a backend.
struct Backend : Cuda {
  static Tensor linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
    return apply_layer(x, {weight, nullptr, bias, kNoBias, kNoActivation});
  }

  static std::vector<Tensor> all_column_sums(const std::vector<Tensor>& given) {
    if (given.size() == 1) return {column_sums(given[0], std::nullopt)};
    std::vector<Tensor> found;
    SumSources sources{};
    for (const Tensor& each : given) {
      found.push_back(new_dense(each, std::vector<int64_t>{each.size(1)}));
      sources.of[found.size() - 1] = {matrix(each), each.size(1), found.back().mutable_data_ptr()};
    }
    check(launch_joint_sums(sources, given[0].size(0), dtype_of(given[0], "grad"), current_stream(given[0])));
    return found;
  }

  static DType dtype(const Tensor& q) { return dtype_of(q, "q"); }
  static void rotary(const Rotary& rotary, const Tensor& q) { check(launch_rotary(rotary, current_stream(q))); }
};

}  // namespace

}  // namespace fused_mlp

#include "../../torch-ext/ops/attention/ops.inl"
