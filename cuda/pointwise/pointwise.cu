#include <algorithm>
#include <iterator>

#include "pointwise.cuh"

namespace fused_mlp {
namespace {

constexpr int64_t kMaxGridY = 65535;

// Few elements are spread over small blocks: on one multiprocessor the warps would wait for each other's activations.
constexpr int64_t kFewBlocks = 264;

// Elements processed in one round of blocks with one vector per thread.
template <int Width>
constexpr int64_t kOneRound = kFewBlocks * kThreads * Width;

// Threads per block, for this many elements and elements per thread.
unsigned threads_for(int64_t elements, int64_t of_thread) {
  unsigned threads = kThreads;
  while (threads > 32 && elements < kFewBlocks * threads * of_thread) threads /= 2;
  return threads;
}

// Two vectors per thread keep the memory busy. If the elements fit into one round of blocks, the time is that of one
// thread's arithmetic, which is half with one vector.
template <typename T, int Width, typename Op>
cudaError_t launch(Operands<Op::kInputs, Op::kOutputs> operands, int64_t rows, int64_t cols, cudaStream_t stream) {
  const int vectors = Width > 1 && rows * cols <= kOneRound<Width> ? 1 : kMostVectors;
  const unsigned threads = threads_for(rows * cols, Width * vectors);
  unsigned x = threads;  // narrow rows share a block
  while (x > 1 && int64_t{x / 2} * Width * vectors >= cols) x /= 2;
  const dim3 block(x, threads / x);
  const dim3 grid(static_cast<unsigned>(ceil_div(cols, int64_t{x} * Width * vectors)),
                  static_cast<unsigned>(std::min(ceil_div(rows, block.y), kMaxGridY)));
  pointwise_kernel<T, Width, Op><<<grid, block, 0, stream>>>(operands, rows, cols, vectors);
  return cudaGetLastError();
}

template <typename T, int Width, typename Op>
cudaError_t launch_row(Operands<Op::kInputs, Op::kOutputs> operands, int64_t cols, cudaStream_t stream) {
  const unsigned threads = threads_for(cols, Width);
  const auto blocks = static_cast<unsigned>(ceil_div(cols, int64_t{threads} * Width));
  row_kernel<T, Width, Op><<<blocks, threads, 0, stream>>>(operands, static_cast<int>(cols));
  return cudaGetLastError();
}

// Columns for the 16-byte kernel; the rest of a row (fewer than one vector) goes to the element-wise one.
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
    if constexpr (Op::kIsLight) {
      // The single-row kernel takes less time for few elements, and needs no second launch for the last ones.
      constexpr int64_t kFewElements = 4 * kOneRound<kWidth>, kMostElements = int64_t{1} << 30;
      if (rows == 1 && (cols <= kFewElements || (cols % kWidth != 0 && cols <= kMostElements))) {
        return launch_row<T, kWidth, Op>(operands, cols, stream);
      }
    }
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
                                        Matrix values, int64_t rows, int64_t cols, DType dtype, int64_t activation,
                                        cudaStream_t stream) {
  return visit_dtype(dtype, [&](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    cudaError_t error = cudaErrorInvalidValue;
    visit_activation(activation, [&]<Activation A>() {
      if (up.data == nullptr) {
        error = values.data == nullptr
                    ? run<T, Backward<A, T, false, false>>({{grad, gate}, {gate_grad}}, rows, cols, stream)
                    : run<T, Backward<A, T, false, true>>({{grad, gate}, {gate_grad, values}}, rows, cols, stream);
      } else {
        error = values.data == nullptr
                    ? run<T, Backward<A, T, true, false>>({{grad, gate, up}, {gate_grad, up_grad}}, rows, cols, stream)
                    : run<T, Backward<A, T, true, true>>({{grad, gate, up}, {gate_grad, up_grad, values}}, rows, cols,
                                                         stream);
      }
    });
    return error;
  });
}

cudaError_t launch_add(void* sum, void* term, int64_t elements, cudaStream_t stream) {
  return run<float, Sum>({{{sum, elements}, {term, elements}}, {{sum, elements}}}, 1, elements, stream);
}

}  // namespace fused_mlp
