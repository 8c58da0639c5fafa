// The CUDA backend's ops for layers with adapters.
#include "../../torch-ext/ops/adapted.h"

#include "training_gemms.h"

namespace fused_mlp {
namespace {
using Backend = Cuda;
}
}  // namespace fused_mlp

#include "../../torch-ext/ops/adapted.inl"
