#include "norm_gradients.cuh"

#include <algorithm>

namespace fused_mlp {
namespace {

// How the threads of a CTA share rows: `lanes` of them for a row, which have so many vectors each; or all, where there
// are none.
struct Shares {
  unsigned lanes, teams;
  int vectors;
};

bool are_vectors(const NormGradients& p) {
  const int64_t width = kVectorBytes / element_bytes(p.dtype);
  const auto aligned = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % kVectorBytes == 0; };
  const auto fits = [&](const Matrix& m) { return aligned(m.data) && (p.rows == 1 || m.row_stride % width == 0); };
  return p.cols % width == 0 && fits(p.x) && fits(p.grad) && fits(p.residual_grad) && fits(p.dx) &&
         aligned(p.norm.weight.data);
}

Shares shares_of(const NormGradients& p) {
  const int64_t packs = p.cols / (kVectorBytes / element_bytes(p.dtype));
  const int most = p.dtype == DType::kFloat32 ? 4 : 2;
  int vectors = 1;
  while (vectors <= most && ceil_div(packs, vectors) > kGradientThreads) vectors *= 2;
  if (vectors > most || !are_vectors(p)) return {kGradientThreads, 1, 0};
  unsigned lanes = 32;
  if (packs > 32) {
    lanes = static_cast<unsigned>(ceil_div(ceil_div(packs, vectors), 32) * 32);
  } else {
    while (lanes > 1 && lanes / 2 >= packs) lanes /= 2;
  }
  return {lanes, kGradientThreads / lanes, vectors};
}

template <typename T, int Vectors>
cudaError_t launch(const NormGradients& p, const Shares& shares, unsigned parts, cudaStream_t stream) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  const auto kernel = p.norm.centred() ? norm_gradients_kernel<T, kWidth, Vectors, true>
                                       : norm_gradients_kernel<T, kWidth, Vectors, false>;
  kernel<<<parts, dim3(shares.lanes, shares.teams), 0, stream>>>(p);
  return cudaGetLastError();
}

template <typename T>
cudaError_t run(const NormGradients& p, unsigned parts, cudaStream_t stream) {
  const Shares shares = shares_of(p);
  if constexpr (sizeof(T) == sizeof(float)) {
    if (shares.vectors == 4) return launch<T, 4>(p, shares, parts, stream);
  }
  if (shares.vectors == 2) return launch<T, 2>(p, shares, parts, stream);
  if (shares.vectors == 1) return launch<T, 1>(p, shares, parts, stream);
  const auto kernel = p.norm.centred() ? any_norm_gradients_kernel<T, true> : any_norm_gradients_kernel<T, false>;
  kernel<<<parts, kGradientThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

int64_t parts_of_norm_gradients(const NormGradients& rows, int multiprocessors) {
  const Shares shares = shares_of(rows);
  const int64_t beside = shares.vectors == 0 ? 2 : ctas_beside(shares.vectors, rows.norm.centred());
  return std::max<int64_t>(std::min(ceil_div(rows.rows, shares.teams), beside * multiprocessors), 1);
}

cudaError_t launch_norm_gradients(const NormGradients& rows, int64_t parts, cudaStream_t stream) {
  if (rows.rows == 0 || rows.cols == 0) return cudaSuccess;
  return visit_dtype(rows.dtype, [&](auto* element) {
    return run<std::remove_pointer_t<decltype(element)>>(rows, static_cast<unsigned>(parts), stream);
  });
}

}  // namespace fused_mlp
