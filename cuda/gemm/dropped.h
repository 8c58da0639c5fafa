// Products of an adapter in front of which a dropout is: its rows, for which the mask is drawn on the way, and its
// gradients. Elements have 16 bits, rows begin at 16 bytes, and of masks at whole words.
#pragma once

#include <cuda_runtime_api.h>

#include "../pointwise/dropout.h"
#include "grouped.h"
#include "problem.h"

namespace fused_mlp {

// A draw of torch's dropout of a tensor whose elements are adjacent: `vector` of them at a time are those of one of its
// threads, which takes four numbers of its own sequence (Philox 4x32-10) for each four.
struct Draw {
  uint64_t seed, offset;  // in numbers
  int64_t threads;
  int vector;  // 4 or 8
  double dropout;

  // The largest number that keeps an element: made a float between 0 and 1, it is less than the probability of that.
  uint32_t last_kept() const {
    const float probability = static_cast<float>(1.0 - dropout);
    uint64_t low = 0, high = uint64_t{1} << 32;  // the first number that keeps nothing is between them
    while (low < high) {
      const uint64_t middle = (low + high) / 2;
      const bool keeps = static_cast<float>(static_cast<uint32_t>(middle)) * 0x1p-32f + 0x1p-33f < probability;
      (keeps ? low : high) = keeps ? middle + 1 : middle;
    }
    return static_cast<uint32_t>(low - 1);
  }
};

constexpr int kWordColumns = 32;

inline bool is_in_vectors(const Matrix& matrix) {
  return reinterpret_cast<uintptr_t>(matrix.data) % 16 == 0 && matrix.row_stride % 8 == 0;
}

// out [rows, ranks] = scale drop(x) a^T, x [rows, cols]; and the mask. Where there is no `out`, the mask alone.
struct DroppedRows {
  Matrix x, a, out;
  int64_t rows, cols, ranks;
  float scale;
  DType dtype;
  Draw draw;
  KeptBits kept;

  static constexpr int kMostRanks = 64;
  bool fits() const {
    return dtype != DType::kFloat32 && ranks > 0 && ranks <= kMostRanks && is_in_vectors(x) && is_in_vectors(a);
  }
};

// rows weight, rows [., ranks] and weight [ranks, cols], times `scale` where an element was kept, else 0. Without a
// mask all were.
struct MaskedTerm {
  Matrix rows, weight;
  int64_t ranks;
  KeptBits kept;
  float scale;
};

// out [rows, cols] = the sum of one term or two.
struct MaskedSum {
  MaskedTerm terms[2];
  int count;
  Matrix out;
  int64_t rows, cols;
  DType dtype;

  static constexpr int kMostRanks = 32;
  bool fits() const {
    bool found = dtype != DType::kFloat32 && cols % kWordColumns == 0 && is_in_vectors(out);
    for (int i = 0; i < count; ++i) {
      const MaskedTerm& term = terms[i];
      found = found && term.ranks <= kMostRanks && is_in_vectors(term.rows) && is_in_vectors(term.weight);
    }
    return found;
  }
};

// out [ranks, cols] = scale grads^T x, grads [rows, ranks], of the elements of x [rows, cols] that were kept. Or, where
// there are ranges, of all elements, and for the rows of every range by itself: out [ranges, ranks, cols].
struct OuterFactor {
  Matrix x, grads, out;
  int64_t rows, cols, ranks;
  float scale;
  DType dtype;
  KeptBits kept;
  const RowRange* ranges = nullptr;
  int count = 0;                // of them
  const int* row_of = nullptr;  // with ranges: the row of x for each of grads; null where it is the same

  static constexpr int kMostMaskedRanks = 32;
  bool fits_masked() const {
    return dtype != DType::kFloat32 && ranks <= kMostMaskedRanks && cols % kWordColumns == 0 && is_in_vectors(x) &&
           is_in_vectors(grads);
  }
};

struct DroppedKernels {
  cudaError_t (*rows)(const DroppedRows& product, cudaStream_t stream);
  cudaError_t (*sum)(const MaskedSum& sum, int multiprocessors, cudaStream_t stream);
  cudaError_t (*outer)(const OuterFactor& product, int multiprocessors, cudaStream_t stream);
};

}  // namespace fused_mlp
