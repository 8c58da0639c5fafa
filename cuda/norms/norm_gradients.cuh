// The kernels of a norm's backward (norm.h), separate from their launch so that device-only compilers can compile this
// file.
#pragma once

#include "norm_teams.cuh"

namespace fused_mlp {

// The maximum number of columns of a row for which a CTA has several teams, whose threads then have one pack of it
// each.
constexpr int most_shared_columns(int vectors) { return vectors == 1 ? 2048 : 1; }

// The number of a team's rows in shared memory: one, or two if there is room on all GPUs.
constexpr int gradient_stages(int vectors) { return vectors == 1 ? 2 : 1; }
// CTAs per multiprocessor; with two, those of a centred norm would spill registers.
constexpr int gradient_ctas(int vectors, bool centred, bool behind) {
  return vectors == 1 && !centred && !behind ? 2 : 1;
}
// `kept_bytes`: the bytes of a pack's mask. If the norm follows a dropout, no residual's gradient is added.
constexpr int gradient_shared_bytes(int vectors, bool behind, int kept_bytes) {
  const int of_packs = vectors * (2 * kVectorBytes + (behind ? kept_bytes : kVectorBytes));
  return gradient_stages(vectors) * kTeamThreads * (of_packs + 2 * static_cast<int>(sizeof(float)));
}

// True for each element of a pack that was kept: torch's masks have one byte per element.
template <int Width>
struct alignas(Width) KeptBytes {
  static_assert(Width % 4 == 0);
  uint32_t words[Width / 4];

  __device__ __forceinline__ bool operator[](int i) const { return (words[i / 4] >> i % 4 * 8 & 0xff) != 0; }
};

// Each thread of a team has `Vectors` packs of every row of the team, so weights and sums over rows stay in its
// registers. While it computes one row it copies the next to shared memory; no other thread reads its part. At the end
// the teams of a CTA add up their sums one after the other. `Behind`: with the gradient before a dropout, or a sum over
// its rows.
template <typename T, int Width, int Vectors, bool Centred, bool Behind>
__global__ void __launch_bounds__(kTeamThreads, gradient_ctas(Vectors, Centred, Behind))
    norm_gradients_kernel(const __grid_constant__ NormGradients p) {
  constexpr int kStages = gradient_stages(Vectors), kSums = 1 + Centred + Behind;
  using Pack = Packed<T, Width>;
  using Other = std::conditional_t<Behind, KeptBytes<Width>, Pack>;
  struct Operands {
    Pack x[Vectors][kTeamThreads], grad[Vectors][kTeamThreads];
    Other other[Vectors][kTeamThreads];  // the mask, or the residual's gradient
    float scale[kTeamThreads], mean[kTeamThreads];
  };
  static_assert(kStages * sizeof(Operands) == gradient_shared_bytes(Vectors, Behind, Width));
  extern __shared__ __align__(16) char memory[];
  Operands* const stages = reinterpret_cast<Operands*>(memory);
  using Shared = float[kSums][most_shared_columns(Vectors)];
  static_assert(sizeof(Shared) <= kStages * sizeof(Operands));
  Shared& of_teams = *reinterpret_cast<Shared*>(memory);  // at the end
  __shared__ float2 places[2][kTeamWarps];
  const Team team{&places};
  const unsigned thread = threadIdx.y * blockDim.x + threadIdx.x;
  const int64_t step = int64_t{gridDim.x} * blockDim.y;
  const bool takes_other = Behind ? p.kept != nullptr : p.residual_grad.data != nullptr;
  int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y, ahead = row;
  unsigned put = 0, get = 0, turn = 0;

  const auto column = [&](int v) { return (v * blockDim.x + threadIdx.x) * Width; };
  const auto copy = [&] {
    Operands& to = stages[put];
    const bool is_row = ahead < p.rows;
#pragma unroll
    for (int v = 0; v < Vectors; ++v) {
      const bool real = is_row && column(v) < p.cols;
      const auto element = [&](const Matrix& m) {
        return static_cast<const T*>(m.data) + (real ? ahead * m.row_stride + column(v) : 0);
      };
      copy_ahead<sizeof(Pack)>(&to.x[v][thread], element(p.x), real);
      copy_ahead<sizeof(Pack)>(&to.grad[v][thread], element(p.grad), real);
      if (!takes_other) continue;
      if constexpr (Behind) {
        copy_ahead<Width>(&to.other[v][thread], p.kept + (real ? ahead * p.cols + column(v) : 0), real);
      } else {
        copy_ahead<sizeof(Pack)>(&to.other[v][thread], element(p.residual_grad), real);
      }
    }
    copy_ahead<sizeof(float)>(&to.scale[thread], p.statistics + (is_row ? ahead : 0), is_row);
    if (Centred) copy_ahead<sizeof(float)>(&to.mean[thread], p.statistics + (is_row ? p.rows + ahead : 0), is_row);
    end_copies();
    ahead += step;
    put = put + 1 == kStages ? 0 : put + 1;
  };
#pragma unroll
  for (int stage = 1; stage < kStages; ++stage) copy();

  Floats<Width> weights[Vectors] = {}, sums[kSums][Vectors] = {};
#pragma unroll
  for (int v = 0; v < Vectors; ++v) {
    if (column(v) < p.cols) weights[v] = read_weights<T, Width>(p.norm, column(v));
  }
  const float share = 1.0f / static_cast<float>(p.cols);
  // Teams of one warp continue together until none has a row.
  for (int64_t first = 0; first < p.rows; first += step, row += step) {
    copy();
    wait_for_copies<kStages - 1>();
    const Operands& from = stages[get];
    get = get + 1 == kStages ? 0 : get + 1;
    Pack x[Vectors], grad[Vectors];
#pragma unroll
    for (int v = 0; v < Vectors; ++v) x[v] = from.x[v][thread], grad[v] = from.grad[v][thread];
    const float scale = from.scale[thread], row_mean = Centred ? from.mean[thread] : 0.0f;
    const auto normed = [&](int v, int i) { return (x[v].lane(i) - row_mean) * scale; };
    float of_row[1 + Centred] = {};
#pragma unroll
    for (int v = 0; v < Vectors; ++v) {
#pragma unroll
      for (int i = 0; i < Width; ++i) {
        const float weighted = grad[v].lane(i) * weights[v].lane[i];
        of_row[0] = fmaf(weighted, normed(v, i), of_row[0]);
        if constexpr (Centred) of_row[1] += weighted;
      }
    }
    team.add(of_row, turn++);
    const float slope = of_row[0] * share, mean = Centred ? of_row[Centred] * share : 0.0f;
#pragma unroll
    for (int v = 0; v < Vectors; ++v) {
      float values[Width];
#pragma unroll
      for (int i = 0; i < Width; ++i) {
        const float value = normed(v, i), each = grad[v].lane(i);
        sums[0][v].lane[i] = fmaf(each, value, sums[0][v].lane[i]);
        if constexpr (Centred) sums[1][v].lane[i] += each;
        const float change = fmaf(-value, slope, each * weights[v].lane[i]);
        values[i] = (Centred ? change - mean : change) * scale;
      }
      if constexpr (!Behind) {
        if (takes_other) {
          const Pack residual = from.other[v][thread];
#pragma unroll
          for (int i = 0; i < Width; ++i) values[i] += residual.lane(i);
        }
      }
      const bool there = row < p.rows && column(v) < p.cols;
      if (there && p.dx.data != nullptr) {
        store(static_cast<T*>(p.dx.data) + row * p.dx.row_stride + column(v), values);
      }
      if constexpr (Behind) {
        if (takes_other) {
          const KeptBytes<Width> kept = from.other[v][thread];
#pragma unroll
          for (int i = 0; i < Width; ++i) values[i] = kept[i] ? values[i] * p.kept_scale : 0.0f;
        }
        if (there) {
#pragma unroll
          for (int i = 0; i < Width; ++i) sums[kSums - 1][v].lane[i] += values[i];
        }
        if (there && p.dropped.data != nullptr) {
          store(static_cast<T*>(p.dropped.data) + row * p.dropped.row_stride + column(v), values);
        }
      }
    }
  }
  if (p.sums == nullptr) return;
  wait_for_copies<0>();
  __syncthreads();

  float* const out = p.sums + blockIdx.x * kSums * p.cols;
  for (unsigned each = 0; each < blockDim.y; ++each) {
    if (each > 0) __syncthreads();
    if (threadIdx.y != each) continue;
#pragma unroll
    for (int of = 0; of < kSums; ++of) {
#pragma unroll
      for (int v = 0; v < Vectors; ++v) {
        if (column(v) >= p.cols) continue;
#pragma unroll
        for (int i = 0; i < Width; ++i) {
          const unsigned col = column(v) + i;
          float sum = sums[of][v].lane[i];
          if (each > 0) sum += of_teams[of][col];
          if (each + 1 < blockDim.y) {
            of_teams[of][col] = sum;
          } else {
            out[of * p.cols + col] = sum;
          }
        }
      }
    }
  }
}

// The same for rows of any width, and for elements that are not whole vectors: a CTA has a row at a time and reads it
// twice, and its sums are in memory.
template <typename T, bool Centred>
__global__ void __launch_bounds__(kTeamThreads) any_norm_gradients_kernel(const __grid_constant__ NormGradients p) {
  const bool behind = p.is_behind();
  const int kinds = 1 + Centred + behind;
  __shared__ float2 places[2][kTeamWarps];
  const Team team{&places};
  const float share = 1.0f / static_cast<float>(p.cols);
  float* const sums = p.sums == nullptr ? nullptr : p.sums + int64_t{blockIdx.x} * kinds * p.cols;
  unsigned turn = 0;
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x, ++turn) {
    const T* const x = static_cast<const T*>(p.x.data) + row * p.x.row_stride;
    const T* const grads = static_cast<const T*>(p.grad.data) + row * p.grad.row_stride;
    const T* const residual = static_cast<const T*>(p.residual_grad.data) + row * p.residual_grad.row_stride;
    const float scale = p.statistics[row], row_mean = Centred ? p.statistics[p.rows + row] : 0.0f;
    float of_row[2] = {};
    for (int64_t col = threadIdx.x; col < p.cols; col += kTeamThreads) {
      const float grad = to_float(grads[col]) * read_weights<T, 1>(p.norm, col).lane[0];
      of_row[0] = fmaf(grad, (to_float(x[col]) - row_mean) * scale, of_row[0]);
      of_row[1] += grad;
    }
    team.add(of_row, turn);
    const float slope = of_row[0] * share, mean = Centred ? of_row[1] * share : 0.0f;
    for (int64_t col = threadIdx.x; col < p.cols; col += kTeamThreads) {
      const float value = (to_float(x[col]) - row_mean) * scale, grad = to_float(grads[col]);
      float change = fmaf(-value, slope, grad * read_weights<T, 1>(p.norm, col).lane[0]);
      change = (change - mean) * scale;
      if (p.residual_grad.data != nullptr) change += to_float(residual[col]);
      if (sums != nullptr) {
        sums[col] = turn == 0 ? grad * value : fmaf(grad, value, sums[col]);
        if (Centred) sums[p.cols + col] = turn == 0 ? grad : sums[p.cols + col] + grad;
      }
      if (p.dx.data != nullptr) static_cast<T*>(p.dx.data)[row * p.dx.row_stride + col] = from_float<T>(change);
      if (!behind) continue;
      if (p.kept != nullptr) change = p.kept[row * p.cols + col] != 0 ? change * p.kept_scale : 0.0f;
      if (sums != nullptr) {
        float& sum = sums[(kinds - 1) * p.cols + col];
        sum = turn == 0 ? change : sum + change;
      }
      if (p.dropped.data == nullptr) continue;
      static_cast<T*>(p.dropped.data)[row * p.dropped.row_stride + col] = from_float<T>(change);
    }
  }
}

}  // namespace fused_mlp
