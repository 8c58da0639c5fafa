// The kernels of a norm's backward (norm.h). Apart from their launch, so that a compiler of device code alone takes
// this file.
#pragma once

#include "norm.cuh"

namespace fused_mlp {

constexpr int kGradientThreads = 512;
constexpr int64_t kMostShared = 2048;  // columns of a row that several teams of a CTA have

// CTAs of a multiprocessor, by what registers they need.
constexpr int ctas_beside(int vectors, bool centred) { return vectors == 1 && !centred ? 2 : 1; }

// A team of threads has a row at a time: part of a warp, or whole warps. This adds up two sums over it. Rows take turns
// with two places in shared memory, so that one barrier for each suffices.
struct Team {
  float2 (*places)[2][kGradientThreads / 32];

  __device__ __forceinline__ void add(float (&sums)[2], unsigned turn) const {
    const unsigned lanes = min(blockDim.x, 32u);
#pragma unroll
    for (unsigned mask = 16; mask > 0; mask /= 2) {
      if (mask < lanes) {
#pragma unroll
        for (float& sum : sums) sum += __shfl_xor_sync(0xffffffff, sum, mask);
      }
    }
    if (blockDim.x <= 32) return;
    const unsigned warps = blockDim.x / 32, first = threadIdx.y * warps;
    float2* const place = (*places)[turn % 2];
    if (threadIdx.x % 32 == 0) place[first + threadIdx.x / 32] = {sums[0], sums[1]};
    asm volatile("bar.sync %0, %1;" ::"r"(threadIdx.y + 1), "r"(blockDim.x) : "memory");
    sums[0] = sums[1] = 0.0f;
    for (unsigned warp = 0; warp < warps; ++warp) {
      sums[0] += place[first + warp].x;
      sums[1] += place[first + warp].y;
    }
  }
};

// The weights from a column on, or ones.
template <typename T, int Width>
__device__ __forceinline__ Floats<Width> read_weights(const Norm& norm, int64_t col) {
  Floats<Width> weights;
  if (norm.weight.data == nullptr) {
#pragma unroll
    for (float& weight : weights.lane) weight = 1.0f;
    return weights;
  }
  if (norm.weight.wide && sizeof(T) != sizeof(float)) {
    weights = read_floats<Width>(static_cast<const float*>(norm.weight.data) + col);
  } else {
    const auto pack = read_pack<T, Width>(norm.weight.data, col);
#pragma unroll
    for (int i = 0; i < Width; ++i) weights.lane[i] = pack.lane(i);
  }
#pragma unroll
  for (float& weight : weights.lane) weight += norm.weight_offset();
  return weights;
}

// Each thread of a team has `Vectors` packs of all rows that come to the team: weights and sums over rows stay in its
// registers. It reads the next row before it computes one, where registers suffice. At the end the teams of a CTA add up
// their sums one after the other.
template <typename T, int Width, int Vectors, bool Centred>
__global__ void __launch_bounds__(kGradientThreads, ctas_beside(Vectors, Centred))
    norm_gradients_kernel(const __grid_constant__ NormGradients p) {
  constexpr bool kReadsAhead = Vectors * sizeof(Packed<T, Width>) <= 32;
  constexpr int kSums = Centred ? 2 : 1;
  using Pack = Packed<T, Width>;
  struct Row {
    Pack x[Vectors], grad[Vectors], residual[Vectors];
    float scale, mean;
  };
  __shared__ float2 places[2][kGradientThreads / 32];
  __shared__ float of_teams[kSums][kMostShared];
  const Team team{&places};
  const int64_t step = int64_t{gridDim.x} * blockDim.y;
  const bool adds = p.residual_grad.data != nullptr;

  const auto column = [&](int v) { return (v * blockDim.x + threadIdx.x) * Width; };
  const auto read = [&](int64_t row) {
    Row read = {};
    if (row >= p.rows) return read;
    read.scale = p.statistics[row];
    if (Centred) read.mean = p.statistics[p.rows + row];
#pragma unroll
    for (int v = 0; v < Vectors; ++v) {
      const unsigned col = column(v);
      if (col >= p.cols) continue;
      read.x[v] = read_pack<T, Width>(p.x.data, row * p.x.row_stride + col);
      read.grad[v] = read_pack<T, Width>(p.grad.data, row * p.grad.row_stride + col);
      if (adds) read.residual[v] = read_pack<T, Width>(p.residual_grad.data, row * p.residual_grad.row_stride + col);
    }
    return read;
  };

  Floats<Width> weights[Vectors] = {}, sums[kSums][Vectors] = {};
#pragma unroll
  for (int v = 0; v < Vectors; ++v) {
    if (column(v) < p.cols) weights[v] = read_weights<T, Width>(p.norm, column(v));
  }
  const float share = 1.0f / static_cast<float>(p.cols);
  int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  Row now = read(row);
  // Teams of one warp go on together, until none has a row.
  for (int64_t first = 0, turn = 0; first < p.rows; first += step, row += step, ++turn) {
    Row next;
    if constexpr (kReadsAhead) next = read(row + step);
    const auto normed = [&](int v, int i) { return (now.x[v].lane(i) - (Centred ? now.mean : 0.0f)) * now.scale; };
    float of_row[2] = {};
#pragma unroll
    for (int v = 0; v < Vectors; ++v) {
#pragma unroll
      for (int i = 0; i < Width; ++i) {
        const float grad = now.grad[v].lane(i) * weights[v].lane[i];
        of_row[0] = fmaf(grad, normed(v, i), of_row[0]);
        if (Centred) of_row[1] += grad;
      }
    }
    team.add(of_row, turn);
    const float slope = of_row[0] * share, mean = of_row[1] * share;
#pragma unroll
    for (int v = 0; v < Vectors; ++v) {
      float values[Width];
#pragma unroll
      for (int i = 0; i < Width; ++i) {
        const float value = normed(v, i), grad = now.grad[v].lane(i);
        sums[0][v].lane[i] = fmaf(grad, value, sums[0][v].lane[i]);
        if constexpr (Centred) sums[1][v].lane[i] += grad;
        const float change = fmaf(-value, slope, grad * weights[v].lane[i]);
        values[i] = (Centred ? change - mean : change) * now.scale;
        if (adds) values[i] += now.residual[v].lane(i);
      }
      if (row < p.rows && column(v) < p.cols && p.dx.data != nullptr) {
        store(static_cast<T*>(p.dx.data) + row * p.dx.row_stride + column(v), values);
      }
    }
    if constexpr (kReadsAhead) {
      now = next;
    } else {
      now = read(row + step);
    }
  }
  if (p.sums == nullptr) return;

  float* const out = p.sums + blockIdx.x * kSums * p.cols;
  for (unsigned turn = 0; turn < blockDim.y; ++turn) {
    if (turn > 0) __syncthreads();
    if (threadIdx.y != turn) continue;
#pragma unroll
    for (int of = 0; of < kSums; ++of) {
#pragma unroll
      for (int v = 0; v < Vectors; ++v) {
        if (column(v) >= p.cols) continue;
#pragma unroll
        for (int i = 0; i < Width; ++i) {
          const unsigned col = column(v) + i;
          float sum = sums[of][v].lane[i];
          if (turn > 0) sum += of_teams[of][col];
          if (turn + 1 < blockDim.y) {
            of_teams[of][col] = sum;
          } else {
            out[of * p.cols + col] = sum;
          }
        }
      }
    }
  }
}

// The same of rows of any width, and of elements that are no whole vectors: a CTA has a row at a time and reads it
// twice, and its sums are in memory.
template <typename T, bool Centred>
__global__ void __launch_bounds__(kGradientThreads) any_norm_gradients_kernel(const __grid_constant__ NormGradients p) {
  constexpr int kSums = Centred ? 2 : 1;
  __shared__ float2 places[2][kGradientThreads / 32];
  const Team team{&places};
  const float share = 1.0f / static_cast<float>(p.cols);
  float* const sums = p.sums == nullptr ? nullptr : p.sums + blockIdx.x * kSums * p.cols;
  unsigned turn = 0;
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x, ++turn) {
    const T* const x = static_cast<const T*>(p.x.data) + row * p.x.row_stride;
    const T* const grads = static_cast<const T*>(p.grad.data) + row * p.grad.row_stride;
    const T* const residual = static_cast<const T*>(p.residual_grad.data) + row * p.residual_grad.row_stride;
    const float scale = p.statistics[row], row_mean = Centred ? p.statistics[p.rows + row] : 0.0f;
    float of_row[2] = {};
    for (int64_t col = threadIdx.x; col < p.cols; col += kGradientThreads) {
      const float grad = to_float(grads[col]) * read_weights<T, 1>(p.norm, col).lane[0];
      of_row[0] = fmaf(grad, (to_float(x[col]) - row_mean) * scale, of_row[0]);
      of_row[1] += grad;
    }
    team.add(of_row, turn);
    const float slope = of_row[0] * share, mean = Centred ? of_row[1] * share : 0.0f;
    for (int64_t col = threadIdx.x; col < p.cols; col += kGradientThreads) {
      const float value = (to_float(x[col]) - row_mean) * scale, grad = to_float(grads[col]);
      float change = fmaf(-value, slope, grad * read_weights<T, 1>(p.norm, col).lane[0]);
      change = (change - mean) * scale;
      if (p.residual_grad.data != nullptr) change += to_float(residual[col]);
      if (sums != nullptr) {
        sums[col] = turn == 0 ? grad * value : fmaf(grad, value, sums[col]);
        if (Centred) sums[p.cols + col] = turn == 0 ? grad : sums[p.cols + col] + grad;
      }
      if (p.dx.data != nullptr) static_cast<T*>(p.dx.data)[row * p.dx.row_stride + col] = from_float<T>(change);
    }
  }
}

}  // namespace fused_mlp
