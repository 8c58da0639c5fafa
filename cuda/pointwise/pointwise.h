#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../../torch-ext/operands/matrix.h"

namespace fused_mlp {

// out = act(gate) * up, or act(gate) if up.data is null. out may be gate or up itself.
cudaError_t launch_act_and_mul(Matrix gate, Matrix up, Matrix out, int64_t rows, int64_t cols, DType dtype,
                               int64_t activation, cudaStream_t stream);

// gate_grad = grad * up * act'(gate), up_grad = grad * act(gate); if up.data is null, gate_grad = grad * act'(gate). If
// values.data is not null, values = act(gate) * up as well, or act(gate). Outputs may be inputs.
cudaError_t launch_act_and_mul_backward(Matrix grad, Matrix gate, Matrix up, Matrix gate_grad, Matrix up_grad,
                                        Matrix values, int64_t rows, int64_t cols, DType dtype, int64_t activation,
                                        cudaStream_t stream);

// sum += term, for `elements` adjacent float32 elements.
cudaError_t launch_add(void* sum, void* term, int64_t elements, cudaStream_t stream);

}  // namespace fused_mlp
