// Persistent CTAs that share the rows of norms: the code that forward and backward of single norms have in common.
#pragma once

#include "norm.cuh"

namespace fused_mlp {

constexpr int kTeamThreads = 512;
constexpr int kTeamWarps = kTeamThreads / 32;

// Copies 16, 8 or 4 bytes to shared memory asynchronously; zeros if `real` is false.
template <int Bytes>
__device__ __forceinline__ void copy_ahead(void* to, const void* from, bool real) {
  const auto shared = static_cast<unsigned>(__cvta_generic_to_shared(to));
  const int bytes = real ? Bytes : 0;
  if constexpr (Bytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(from), "r"(bytes) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(from), "n"(Bytes), "r"(bytes)
                 : "memory");
  }
}

__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all groups of this thread's copies have arrived except the last kGroups.
template <int Groups>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Groups) : "memory");
}

// A team of threads, which is part of a warp or whole warps, processes one row at a time. This sums over the team. Sums
// alternate between two places in shared memory, so that one barrier per sum suffices.
struct Team {
  float2 (*places)[2][kTeamWarps];

  template <int Count>
  __device__ __forceinline__ void add(float (&sums)[Count], unsigned turn) const {
    static_assert(Count == 1 || Count == 2);
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
    float2* const place = (*places)[turn % 2] + first;
    if (threadIdx.x % 32 == 0) place[threadIdx.x / 32] = {sums[0], sums[Count - 1]};
    asm volatile("bar.sync %0, %1;" ::"r"(threadIdx.y + 1), "r"(blockDim.x) : "memory");
    float2 total{};
#pragma unroll
    for (unsigned warp = 0; warp < kTeamWarps; ++warp) {
      if (warp >= warps) continue;
      total.x += place[warp].x;
      if (Count == 2) total.y += place[warp].y;
    }
    sums[0] = total.x;
    if (Count == 2) sums[Count - 1] = total.y;
  }
};

// The weights, or the biases, from a given column; `otherwise` if there are none.
template <typename T, int Width>
__device__ __forceinline__ Floats<Width> read_features(const Features& features, int64_t col, float otherwise) {
  Floats<Width> found;
  if (features.data == nullptr) {
#pragma unroll
    for (float& each : found.lane) each = otherwise;
  } else if (features.wide && sizeof(T) != sizeof(float)) {
    found = read_floats<Width>(static_cast<const float*>(features.data) + col);
  } else {
    const auto pack = read_pack<T, Width>(features.data, col);
#pragma unroll
    for (int i = 0; i < Width; ++i) found.lane[i] = pack.lane(i);
  }
  return found;
}

template <typename T, int Width>
__device__ __forceinline__ Floats<Width> read_weights(const Norm& norm, int64_t col) {
  auto weights = read_features<T, Width>(norm.weight, col, 1.0f);
  if (norm.weight.data != nullptr) {
#pragma unroll
    for (float& weight : weights.lane) weight += norm.weight_offset();
  }
  return weights;
}

// norm(x) of many rows, all of which share weight and bias. Each thread of a team has a pack of every row of the team,
// and copies of the next rows are in flight.
template <typename T, int Width, bool Centred>
__global__ void __launch_bounds__(kTeamThreads, 2) team_norm_kernel(const __grid_constant__ NormRows p) {
  constexpr int kStages = 3;
  using Pack = Packed<T, Width>;
  __shared__ Pack packs[kStages][kTeamThreads];
  __shared__ float2 places[2][kTeamWarps];
  const Team team{&places};
  const unsigned thread = threadIdx.y * blockDim.x + threadIdx.x, col = threadIdx.x * Width;
  const int64_t step = int64_t{gridDim.x} * blockDim.y;
  const bool there = col < p.cols;
  int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y, ahead = row;
  unsigned put = 0, get = 0, turn = 0;
  const auto copy = [&] {
    const bool real = there && ahead < p.rows;
    const int64_t from = real ? ahead * p.x.row_stride + col : 0;
    copy_ahead<sizeof(Pack)>(&packs[put][thread], static_cast<const T*>(p.x.data) + from, real);
    end_copies();
    ahead += step;
    put = put + 1 == kStages ? 0 : put + 1;
  };
  wait_for_previous_kernel();
  allow_next_kernel();
#pragma unroll
  for (int stage = 1; stage < kStages; ++stage) copy();
  Floats<Width> weights{}, biases{};
  if (there) {
    weights = read_weights<T, Width>(p.norm, col);
    if (Centred) biases = read_features<T, Width>(p.norm.bias, col, 0.0f);
  }
  const float share = 1.0f / static_cast<float>(p.cols);
  // Teams of one warp continue together until none has a row.
  for (int64_t first = 0; first < p.rows; first += step, row += step) {
    copy();
    wait_for_copies<kStages - 1>();
    const Pack x = packs[get][thread];
    get = get + 1 == kStages ? 0 : get + 1;
    float mean = 0.0f, variance;
    if constexpr (Centred) {
      float sum[1] = {}, moments[2] = {};
#pragma unroll
      for (int i = 0; i < Width; ++i) sum[0] = fmaf(x.lane(i), share, sum[0]);
      team.add(sum, turn++);
#pragma unroll
      for (int i = 0; i < Width; ++i) {
        const float value = there ? x.lane(i) - sum[0] : 0.0f;
        moments[0] += value;
        moments[1] = fmaf(value, value, moments[1]);
      }
      team.add(moments, turn++);
      const float left = moments[0] * share;
      variance = variance_of(moments[1] * share, left);
      mean = sum[0] + left;
    } else {
      float squares[1] = {};
#pragma unroll
      for (int i = 0; i < Width; ++i) squares[0] = fmaf(x.lane(i), x.lane(i), squares[0]);
      team.add(squares, turn++);
      variance = squares[0] * share;
    }
    if (row >= p.rows) continue;
    const float scale = __frsqrt_rn(variance + p.norm.eps);
    if (p.statistics != nullptr && threadIdx.x == 0) {
      p.statistics[row] = scale;
      if (Centred) p.statistics[p.rows + row] = mean;
    }
    float values[Width];
#pragma unroll
    for (int i = 0; i < Width; ++i) {
      values[i] = (x.lane(i) - mean) * scale;
      if (p.norm.rounded) values[i] = to_float(from_float<T>(values[i]));
      values[i] *= weights.lane[i];
      if (Centred) values[i] += biases.lane[i];
    }
    if (there) store(static_cast<T*>(p.out.data) + row * p.out.row_stride + col, values);
  }
}

constexpr int kSumWarps = 8;
constexpr int kMostSumPacks = 6;  // per lane

// norm(x), or with `Sum` norm(residual + x), of many rows, all of which share weight and bias. A warp has a row, of
// which each lane keeps `Packs` packs in registers, so that no thread waits at a barrier.
template <typename T, int Width, int Packs, bool Centred, bool Sum>
__global__ void __launch_bounds__(32 * kSumWarps) warp_norm_kernel(const __grid_constant__ NormRows p) {
  using Pack = Packed<T, Width>;
  wait_for_previous_kernel();
  allow_next_kernel();
  const int64_t row = int64_t{blockIdx.x} * kSumWarps + threadIdx.y;
  if (row >= p.rows) return;
  const auto column = [&](int v) { return (v * 32 + threadIdx.x) * Width; };
  const T* const x = static_cast<const T*>(p.x.data) + row * p.x.row_stride;
  const T* const residual = static_cast<const T*>(p.residual.data) + row * p.residual.row_stride;
  Pack of_x[Packs], of_residual[Packs];
#pragma unroll
  for (int v = 0; v < Packs; ++v) {
    if (column(v) >= p.cols) continue;
    of_x[v] = read_pack<T, Width>(x, column(v));
    if constexpr (Sum) of_residual[v] = read_pack<T, Width>(residual, column(v));
  }
  float values[Packs][Width];
  const float share = 1.0f / static_cast<float>(p.cols);
  float sums[1] = {};
#pragma unroll
  for (int v = 0; v < Packs; ++v) {
#pragma unroll
    for (int i = 0; i < Width; ++i) {
      float value = column(v) < p.cols ? of_x[v].lane(i) : 0.0f;
      if constexpr (Sum) {
        value = column(v) < p.cols ? to_float(from_float<T>(value + of_residual[v].lane(i))) : 0.0f;
      }
      values[v][i] = value;
      sums[0] = Centred ? fmaf(values[v][i], share, sums[0]) : fmaf(values[v][i], values[v][i], sums[0]);
    }
    if (Sum && column(v) < p.cols) store(static_cast<T*>(p.sum) + row * p.cols + column(v), values[v]);
  }
  add_over_warp(sums);
  float mean = 0.0f, variance = sums[0] * share;
  if constexpr (Centred) {
    float moments[2] = {};
#pragma unroll
    for (int v = 0; v < Packs; ++v) {
#pragma unroll
      for (int i = 0; i < Width; ++i) {
        const float value = column(v) < p.cols ? values[v][i] - sums[0] : 0.0f;
        moments[0] += value;
        moments[1] = fmaf(value, value, moments[1]);
      }
    }
    add_over_warp(moments);
    const float left = moments[0] * share;
    variance = variance_of(moments[1] * share, left);
    mean = sums[0] + left;
  }
  const float scale = __frsqrt_rn(variance + p.norm.eps);
  if (p.statistics != nullptr && threadIdx.x == 0) {
    p.statistics[row] = scale;
    if (Centred) p.statistics[p.rows + row] = mean;
  }
#pragma unroll
  for (int v = 0; v < Packs; ++v) {
    if (column(v) >= p.cols) continue;
    const auto weights = read_weights<T, Width>(p.norm, column(v));
    const auto biases = read_features<T, Width>(p.norm.bias, column(v), 0.0f);
#pragma unroll
    for (int i = 0; i < Width; ++i) {
      float value = (values[v][i] - mean) * scale;
      if (!Sum && p.norm.rounded) value = to_float(from_float<T>(value));
      values[v][i] = fmaf(value, weights.lane[i], biases.lane[i]);
    }
    store(static_cast<T*>(p.out.data) + row * p.out.row_stride + column(v), values[v]);
  }
}

}  // namespace fused_mlp
