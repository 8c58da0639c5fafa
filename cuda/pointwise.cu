#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <iterator>
#include <type_traits>

#include "activations.cuh"
#include "pointwise.h"

namespace fused_mlp {
namespace {

constexpr int kThreads = 256;
constexpr int kVectorBytes = 16;
constexpr int kUnroll = 2;  // vectors a thread has in flight per operand
constexpr int64_t kMaxGridY = 65535;

template <typename T>
__device__ __forceinline__ float to_float(T x) {
  return static_cast<float>(x);
}

template <typename T>
__device__ __forceinline__ T from_float(float x) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(x);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(x);
  } else {
    return x;
  }
}

template <typename T, int Width>
struct alignas(sizeof(T) * Width) Vector {
  T lane[Width];
};

template <Activation A, typename T>
using Fn = ActivationFn<A, !std::is_same_v<T, float>>;

// The two operations: `Inputs` operands in, `Outputs` out, `apply` on one element of each.
template <Activation A, typename T, bool Gated>
struct Forward {
  static constexpr int kInputs = Gated ? 2 : 1;
  static constexpr int kOutputs = 1;
  static __device__ __forceinline__ void apply(const float (&in)[kInputs], float (&out)[kOutputs]) {
    out[0] = Fn<A, T>::value(in[0]);
    if constexpr (Gated) out[0] *= in[1];
  }
};

template <Activation A, typename T>
struct Backward {
  static constexpr int kInputs = 3;
  static constexpr int kOutputs = 2;
  static __device__ __forceinline__ void apply(const float (&in)[kInputs], float (&out)[kOutputs]) {
    const float grad = in[0], gate = in[1], up = in[2];
    out[0] = grad * up * Fn<A, T>::derivative(gate);
    out[1] = grad * Fn<A, T>::value(gate);
  }
};

template <int Inputs, int Outputs>
struct Operands {
  Matrix in[Inputs];
  Matrix out[Outputs];
};

// A block covers blockDim.y rows and blockDim.x * kUnroll vectors of columns.
template <typename T, int Width, typename Op>
__global__ void __launch_bounds__(kThreads)
    pointwise_kernel(Operands<Op::kInputs, Op::kOutputs> operands, int64_t rows, int64_t cols) {
  using Vec = Vector<T, Width>;
  const int64_t first_col = (int64_t{blockIdx.x} * blockDim.x * kUnroll + threadIdx.x) * Width;
  for (int64_t row = int64_t{blockIdx.y} * blockDim.y + threadIdx.y; row < rows;
       row += int64_t{gridDim.y} * blockDim.y) {
    Vec in[kUnroll][Op::kInputs];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t col = first_col + int64_t{u} * blockDim.x * Width;
      if (col + Width > cols) continue;
#pragma unroll
      for (int i = 0; i < Op::kInputs; ++i) {
        const T* source = static_cast<const T*>(operands.in[i].data) + row * operands.in[i].row_stride;
        in[u][i] = *reinterpret_cast<const Vec*>(source + col);
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t col = first_col + int64_t{u} * blockDim.x * Width;
      if (col + Width > cols) continue;
      Vec out[Op::kOutputs];
#pragma unroll
      for (int lane = 0; lane < Width; ++lane) {
        float x[Op::kInputs], y[Op::kOutputs];
#pragma unroll
        for (int i = 0; i < Op::kInputs; ++i) x[i] = to_float(in[u][i].lane[lane]);
        Op::apply(x, y);
#pragma unroll
        for (int i = 0; i < Op::kOutputs; ++i) out[i].lane[lane] = from_float<T>(y[i]);
      }
#pragma unroll
      for (int i = 0; i < Op::kOutputs; ++i) {
        T* target = static_cast<T*>(operands.out[i].data) + row * operands.out[i].row_stride;
        *reinterpret_cast<Vec*>(target + col) = out[i];
      }
    }
  }
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <typename T, int Width, typename Op>
cudaError_t launch(Operands<Op::kInputs, Op::kOutputs> operands, int64_t rows, int64_t cols, cudaStream_t stream) {
  unsigned x = kThreads;  // narrow rows share a block
  while (x > 1 && int64_t{x / 2} * Width * kUnroll >= cols) x /= 2;
  const dim3 block(x, kThreads / x);
  const dim3 grid(static_cast<unsigned>(ceil_div(cols, int64_t{x} * Width * kUnroll)),
                  static_cast<unsigned>(std::min(ceil_div(rows, block.y), kMaxGridY)));
  pointwise_kernel<T, Width, Op><<<grid, block, 0, stream>>>(operands, rows, cols);
  return cudaGetLastError();
}

// Columns the 16-byte kernel takes; the rest of a row (fewer than one vector) goes to the element-wise one.
template <int Width, int N>
bool vectorisable(const Matrix (&matrices)[N], int64_t rows) {
  return std::all_of(matrices, matrices + N, [&](const Matrix& m) {
    return reinterpret_cast<uintptr_t>(m.data) % kVectorBytes == 0 && (rows == 1 || m.row_stride % Width == 0);
  });
}

template <typename T, typename Op>
cudaError_t run(Operands<Op::kInputs, Op::kOutputs> operands, int64_t rows, int64_t cols, cudaStream_t stream) {
  if (rows == 0 || cols == 0) return cudaSuccess;
  const auto dense = [&](const Matrix& m) { return m.row_stride == cols; };
  if (std::all_of(std::begin(operands.in), std::end(operands.in), dense) &&
      std::all_of(std::begin(operands.out), std::end(operands.out), dense)) {
    cols *= rows;
    rows = 1;
  }
  constexpr int kWidth = kVectorBytes / sizeof(T);
  int64_t done = 0;
  if (vectorisable<kWidth>(operands.in, rows) && vectorisable<kWidth>(operands.out, rows)) {
    done = cols - cols % kWidth;
    if (done > 0) {
      const cudaError_t error = launch<T, kWidth, Op>(operands, rows, done, stream);
      if (error != cudaSuccess || done == cols) return error;
    }
  }
  for (Matrix& m : operands.in) m.data = static_cast<T*>(m.data) + done;
  for (Matrix& m : operands.out) m.data = static_cast<T*>(m.data) + done;
  return launch<T, 1, Op>(operands, rows, cols - done, stream);
}

// Calls visit with a null pointer of the element type.
template <typename Visitor>
cudaError_t visit_dtype(DType dtype, Visitor&& visit) {
  switch (dtype) {
    case DType::kFloat32:
      return visit(static_cast<float*>(nullptr));
    case DType::kFloat16:
      return visit(static_cast<__half*>(nullptr));
    case DType::kBFloat16:
      return visit(static_cast<__nv_bfloat16*>(nullptr));
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t launch_act_and_mul(Matrix gate, Matrix up, Matrix out, int64_t rows, int64_t cols, DType dtype,
                               int64_t activation, cudaStream_t stream) {
  return visit_dtype(dtype, [&](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    cudaError_t error = cudaErrorInvalidValue;
    visit_activation(activation, [&]<Activation A>() {
      error = up.data == nullptr ? run<T, Forward<A, T, false>>({{gate}, {out}}, rows, cols, stream)
                                 : run<T, Forward<A, T, true>>({{gate, up}, {out}}, rows, cols, stream);
    });
    return error;
  });
}

cudaError_t launch_act_and_mul_backward(Matrix grad, Matrix gate, Matrix up, Matrix gate_grad, Matrix up_grad,
                                        int64_t rows, int64_t cols, DType dtype, int64_t activation,
                                        cudaStream_t stream) {
  return visit_dtype(dtype, [&](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    cudaError_t error = cudaErrorInvalidValue;
    visit_activation(activation, [&]<Activation A>() {
      error = run<T, Backward<A, T>>({{grad, gate, up}, {gate_grad, up_grad}}, rows, cols, stream);
    });
    return error;
  });
}

}  // namespace fused_mlp
