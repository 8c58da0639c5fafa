// The pointwise kernels: activation, optionally gated, forward and backward, separate from their launches so that
// device-only compilers can compile this file.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../activations.cuh"
#include "../vector.cuh"
#include "pointwise.h"

namespace fused_mlp {

constexpr int kThreads = 256;

// These kernels are memory-bound, so the more accurate of the two fits costs nothing.
template <Activation A, typename T>
using Fn = ActivationFn<A, std::is_same_v<T, float> ? Precision::kFloat32 : Precision::kFloat16>;

// The operations: `kInputs` operands in, `kOutputs` out, `apply` on one element of each. Light ones also have
// row_kernel: with few elements a loop would cost noticeable time.
template <Activation A, typename T, bool Gated>
struct Forward {
  static constexpr bool kIsLight = true;
  static constexpr int kInputs = Gated ? 2 : 1;
  static constexpr int kOutputs = 1;
  static __device__ __forceinline__ void apply(const float (&in)[kInputs], float (&out)[kOutputs]) {
    out[0] = Fn<A, T>::value(in[0]);
    if constexpr (Gated) out[0] *= in[1];
  }
};

// With `Values`, the last output is the result of Forward.
template <Activation A, typename T, bool Gated, bool Values>
struct Backward {
  static constexpr bool kIsLight = false;
  static constexpr int kInputs = Gated ? 3 : 2;
  static constexpr int kOutputs = (Gated ? 2 : 1) + (Values ? 1 : 0);
  static __device__ __forceinline__ void apply(const float (&in)[kInputs], float (&out)[kOutputs]) {
    const float grad = in[0], gate = in[1];
    if constexpr (Gated) {
      out[0] = grad * in[2] * Fn<A, T>::derivative(gate);
      out[1] = grad * Fn<A, T>::value(gate);
    } else {
      out[0] = grad * Fn<A, T>::derivative(gate);
    }
    if constexpr (Values) out[kOutputs - 1] = Fn<A, T>::value(gate) * (Gated ? in[kInputs - 1] : 1.0f);
  }
};

struct Sum {
  static constexpr bool kIsLight = false;
  static constexpr int kInputs = 2;
  static constexpr int kOutputs = 1;
  static __device__ __forceinline__ void apply(const float (&in)[kInputs], float (&out)[kOutputs]) {
    out[0] = in[0] + in[1];
  }
};

template <int Inputs, int Outputs>
struct Operands {
  Matrix in[Inputs];
  Matrix out[Outputs];
};

constexpr int kMostVectors = 2;

template <typename Op, typename T, int Width>
__device__ __forceinline__ void apply_to_vectors(const Vector<T, Width> (&in)[Op::kInputs],
                                                 float (&results)[Op::kOutputs][Width]) {
#pragma unroll
  for (int lane = 0; lane < Width; ++lane) {
    float x[Op::kInputs], y[Op::kOutputs];
#pragma unroll
    for (int i = 0; i < Op::kInputs; ++i) x[i] = to_float(in[i].lane[lane]);
    Op::apply(x, y);
#pragma unroll
    for (int i = 0; i < Op::kOutputs; ++i) results[i][lane] = y[i];
  }
}

// A block covers blockDim.y rows and blockDim.x * vectors vectors of columns. A thread has that many vectors in flight
// per operand.
template <typename T, int Width, typename Op>
__global__ void __launch_bounds__(kThreads)
    pointwise_kernel(Operands<Op::kInputs, Op::kOutputs> operands, int64_t rows, int64_t cols, int vectors) {
  using Vec = Vector<T, Width>;
  // With 16-bit elements a vector has enough work to hide latencies: without unrolling, the loop uses fewer registers,
  // and more warps fit. A float32 vector has half as many values.
  constexpr int kUnrolled = Width == 4 ? kMostVectors : 1;
  const int64_t first_col = (int64_t{blockIdx.x} * blockDim.x * vectors + threadIdx.x) * Width;
  for (int64_t row = int64_t{blockIdx.y} * blockDim.y + threadIdx.y; row < rows;
       row += int64_t{gridDim.y} * blockDim.y) {
    Vec in[kMostVectors][Op::kInputs];
#pragma unroll
    for (int u = 0; u < kMostVectors; ++u) {
      const int64_t col = first_col + int64_t{u} * blockDim.x * Width;
      if (u >= vectors || col + Width > cols) continue;
#pragma unroll
      for (int i = 0; i < Op::kInputs; ++i) {
        const T* source = static_cast<const T*>(operands.in[i].data) + row * operands.in[i].row_stride;
        in[u][i] = *reinterpret_cast<const Vec*>(source + col);
      }
    }
#pragma unroll kUnrolled
    for (int u = 0; u < kMostVectors; ++u) {
      const int64_t col = first_col + int64_t{u} * blockDim.x * Width;
      if (u >= vectors || col + Width > cols) break;
      float results[Op::kOutputs][Width];
      apply_to_vectors<Op>(in[0], results);
#pragma unroll
      for (int i = 0; i < Op::kOutputs; ++i) {
        store(static_cast<T*>(operands.out[i].data) + row * operands.out[i].row_stride + col, results[i]);
      }
#pragma unroll
      for (int i = 0; i < Op::kInputs; ++i) in[0][i] = in[1][i];  // a variable index would move `in` out of registers
    }
  }
}

// Each thread processes one vector of a single row; the first threads also process one of the elements after the last
// vector.
template <typename T, int Width, typename Op>
__global__ void __launch_bounds__(kThreads) row_kernel(Operands<Op::kInputs, Op::kOutputs> operands, int cols) {
  const auto apply_at = [&]<int W>(int col) {
    Vector<T, W> in[Op::kInputs];
#pragma unroll
    for (int i = 0; i < Op::kInputs; ++i) {
      in[i] = *reinterpret_cast<const Vector<T, W>*>(static_cast<const T*>(operands.in[i].data) + col);
    }
    float results[Op::kOutputs][W];
    apply_to_vectors<Op>(in, results);
#pragma unroll
    for (int i = 0; i < Op::kOutputs; ++i) store(static_cast<T*>(operands.out[i].data) + col, results[i]);
  };
  const int thread = blockIdx.x * blockDim.x + threadIdx.x;
  const int vectors = cols / Width, behind = vectors * Width + thread;
  if (thread < vectors) apply_at.template operator()<Width>(thread * Width);
  if (behind < cols) apply_at.template operator()<1>(behind);
}

}  // namespace fused_mlp
