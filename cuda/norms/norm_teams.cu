#include <algorithm>

#include "../gemm/shared_memory.cuh"
#include "norm_gradients.cuh"

namespace fused_mlp {
namespace {

constexpr int64_t width_of(DType dtype) { return kVectorBytes / element_bytes(dtype); }

// True if rows of this many columns are whole vectors in all of these matrices.
template <typename... Matrices>
bool are_vectors(DType dtype, int64_t rows, int64_t cols, const Matrices&... matrices) {
  const auto aligned = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % kVectorBytes == 0; };
  const auto fits = [&](const Matrix& m) {
    return aligned(m.data) && (rows == 1 || m.row_stride % width_of(dtype) == 0);
  };
  return cols % width_of(dtype) == 0 && (fits(matrices) && ...);
}

// The number of threads for a row of this many packs: whole warps, or a power-of-two part of one.
unsigned lanes_of(int64_t packs) {
  if (packs > 32) return static_cast<unsigned>(ceil_div(packs, 32) * 32);
  unsigned lanes = 32;
  while (lanes > 1 && lanes / 2 >= packs) lanes /= 2;
  return lanes;
}

// The division of rows among the threads of a CTA: `lanes` threads per row, which have so many vectors each; or, if
// there are none, all threads.
struct Shares {
  unsigned lanes, teams;
  int vectors;
};

Shares shares_of(const NormGradients& p) {
  const int64_t packs = p.cols / width_of(p.dtype);
  const int vectors = packs > kTeamThreads ? 2 : 1;
  const Matrix weight{const_cast<void*>(p.norm.weight.data), 0};
  const Matrix kept{const_cast<uint8_t*>(p.kept), 0};
  const bool whole = are_vectors(p.dtype, p.rows, p.cols, p.x, p.grad, p.residual_grad, p.dx, p.dropped, weight, kept);
  if (packs > 2 * kTeamThreads || !whole) return {kTeamThreads, 1, 0};
  const unsigned lanes = lanes_of(ceil_div(packs, vectors));
  return {lanes, kTeamThreads / lanes, vectors};
}

template <typename T, int Vectors, bool Centred, bool Behind>
cudaError_t launch(const NormGradients& p, const Shares& shares, unsigned parts, cudaStream_t stream) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  constexpr int kBytes = gradient_shared_bytes(Vectors, Behind, kWidth);
  constexpr auto kKernel = norm_gradients_kernel<T, kWidth, Vectors, Centred, Behind>;
  const cudaError_t error = allow_shared_memory<kKernel>(kBytes);
  if (error != cudaSuccess) return error;
  kKernel<<<parts, dim3(shares.lanes, shares.teams), kBytes, stream>>>(p);
  return cudaGetLastError();
}

template <typename T, int Vectors, bool Centred>
cudaError_t launch(const NormGradients& p, const Shares& shares, unsigned parts, cudaStream_t stream) {
  return p.is_behind() ? launch<T, Vectors, Centred, true>(p, shares, parts, stream)
                       : launch<T, Vectors, Centred, false>(p, shares, parts, stream);
}

template <typename T, bool Centred>
cudaError_t run(const NormGradients& p, unsigned parts, cudaStream_t stream) {
  const Shares shares = shares_of(p);
  if (shares.vectors == 2) return launch<T, 2, Centred>(p, shares, parts, stream);
  if (shares.vectors == 1) return launch<T, 1, Centred>(p, shares, parts, stream);
  any_norm_gradients_kernel<T, Centred><<<parts, kTeamThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

namespace {

// True if one warp per row suffices.
bool fit_warps(const NormRows& p) { return p.cols <= 32 * kMostSumPacks * width_of(p.dtype); }

// True if rows are those of a sum, whose norm has a backward.
bool are_sums(const NormRows& p) {
  return p.norm.residual == Residual::kNormed && p.norm.factor == 1.0f && p.sum != nullptr && p.statistics != nullptr;
}

template <typename T, int Packs, bool Centred, bool Sum>
cudaError_t launch_warps(const NormRows& p, cudaStream_t stream) {
  constexpr auto kKernel = warp_norm_kernel<T, kVectorBytes / sizeof(T), Packs, Centred, Sum>;
  kKernel<<<static_cast<unsigned>(ceil_div(p.rows, kSumWarps)), dim3(32, kSumWarps), 0, stream>>>(p);
  return cudaGetLastError();
}

// Single norms that are not centred take less time with more threads per row.
template <typename T, int Packs>
cudaError_t launch_warps(const NormRows& p, cudaStream_t stream) {
  if (p.norm.residual == Residual::kNone) return launch_warps<T, Packs, true, false>(p, stream);
  return p.norm.centred() ? launch_warps<T, Packs, true, true>(p, stream)
                          : launch_warps<T, Packs, false, true>(p, stream);
}

// Launches the kernel whose lanes have as many packs as this row needs, or slightly more.
template <typename T>
cudaError_t launch_warps(const NormRows& p, cudaStream_t stream) {
  switch (ceil_div(p.cols, 32 * width_of(p.dtype))) {
    case 1:
      return launch_warps<T, 1>(p, stream);
    case 2:
      return launch_warps<T, 2>(p, stream);
    case 3:
      return launch_warps<T, 3>(p, stream);
    case 4:
      return launch_warps<T, 4>(p, stream);
    default:
      return launch_warps<T, kMostSumPacks>(p, stream);
  }
}

// True if a single norm uses a team per row instead of a warp per row.
bool takes_teams(const NormRows& p) { return !p.norm.centred() || p.cols <= 32 * width_of(p.dtype); }

}  // namespace

bool have_teams(const NormRows& p) {
  constexpr int64_t kLeastRows = 1024;  // few rows start early after a GEMM in the other kernel; not tuned
  const Features &weight = p.norm.weight, &bias = p.norm.bias;
  const auto matrix = [](const Features& f) { return Matrix{const_cast<void*>(f.data), 0}; };
  // A centred norm sums twice, and more than one warp per row would have to wait for each other.
  const bool fits = p.norm.centred() ? fit_warps(p) : p.cols <= kTeamThreads * width_of(p.dtype);
  const bool taken = (p.norm.residual == Residual::kNone && fits) || (are_sums(p) && fit_warps(p));
  return p.rows >= kLeastRows && taken && p.norm.normed() && weight.stride == 0 && bias.stride == 0 &&
         (p.norm.centred() || bias.data == nullptr) &&
         are_vectors(p.dtype, p.rows, p.cols, p.x, p.residual, Matrix{p.sum, p.cols}, p.out, matrix(weight),
                     matrix(bias));
}

cudaError_t launch_team_norm(const NormRows& p, int multiprocessors, cudaStream_t stream) {
  return visit_dtype(p.dtype, [&](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    constexpr int kWidth = kVectorBytes / sizeof(T);
    if (p.norm.residual != Residual::kNone || !takes_teams(p)) return launch_warps<T>(p, stream);
    const auto kernel = p.norm.centred() ? team_norm_kernel<T, kWidth, true> : team_norm_kernel<T, kWidth, false>;
    const unsigned lanes = lanes_of(p.cols / kWidth), teams = kTeamThreads / lanes;
    const int64_t ctas = std::min<int64_t>(ceil_div(p.rows, teams), 2 * multiprocessors);
    kernel<<<static_cast<unsigned>(ctas), dim3(lanes, teams), 0, stream>>>(p);
    return cudaGetLastError();
  });
}

int64_t parts_of_norm_gradients(const NormGradients& rows, int multiprocessors) {
  const Shares shares = shares_of(rows);
  const int64_t beside = shares.vectors == 0 ? 2 : gradient_ctas(shares.vectors, rows.norm.centred(), rows.is_behind());
  return std::max<int64_t>(std::min(ceil_div(rows.rows, shares.teams), beside * multiprocessors), 1);
}

cudaError_t launch_norm_gradients(const NormGradients& rows, int64_t parts, cudaStream_t stream) {
  if (rows.rows == 0 || rows.cols == 0) return cudaSuccess;
  return visit_dtype(rows.dtype, [&](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    const auto ctas = static_cast<unsigned>(parts);
    return rows.norm.centred() ? run<T, true>(rows, ctas, stream) : run<T, false>(rows, ctas, stream);
  });
}

}  // namespace fused_mlp
