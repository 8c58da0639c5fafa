// The low-rank product that a GEMM adds to its own (LowRank in problem.h).
#pragma once

#include <cuda.h>

#include "../../gemm/problem.h"
#include "../chip.h"
#include "../tensor_map.h"

namespace fused_mlp::sm90 {

// Blocks of k after those of the GEMM. Reads outside the operands return zero, so gate's and up's rows, side by side,
// are multiplied by both weights: each by the rows of its own columns, and by zeros.
struct LowRankArgs {
  CUtensorMap rows, weight, up_weight;
  int blocks;  // for a pair of products, the blocks of the first
  // First columns of the weights that match those of `rows`; in a pair, `up_shift` is the first column of up's rows.
  int shift, up_shift;
  // The mask of the term, which then precedes the GEMM's own blocks; null if there is none.
  const uint32_t* kept;
  int words_of_row, rows_of_mask;
  float scale;
};

// Encodes the TMA descriptors of the low-rank term of a product with weights [n, k], or [k, n] if it reads them as they
// are stored, in boxes of these numbers of rows. For a missing weight, only zeros are read.
inline bool encode_low_rank(const GemmProblem& p, int box_rows_a, int box_rows, LowRankArgs* args) {
  const LowRank& term = p.low_rank;
  args->kept = term.kept;
  if (!term) return true;
  args->words_of_row = static_cast<int>(term.words_of_row);
  args->rows_of_mask = static_cast<int>(p.m);
  args->scale = term.scale;
  const bool lies = reads_weights_as_they_lie(p.product());
  const auto encode = [&](CUtensorMap* map, const Matrix& weight, int64_t k) {
    return encode_tensor_map(map, p.dtype, weight, lies ? k : p.n, lies ? p.n : k, box_rows, 64);
  };
  args->blocks = ceil_div(term.k, kBlockK);
  constexpr int kOutside = 1 << 24;
  args->shift = term.k > 0 ? 0 : kOutside;
  const int up_column = static_cast<int>(term.up_column);
  args->up_shift = p.pair() ? up_column : term.up_k > 0 ? -up_column : kOutside;
  const bool has_up = p.gated() || p.pair();
  return encode_tensor_map(&args->rows, p.dtype, term.rows, p.m, term.columns(), box_rows_a, kBlockK) &&
         (term.k > 0 ? encode(&args->weight, term.weight, term.k) : encode(&args->weight, term.up_weight, term.up_k)) &&
         (!has_up || (term.up_k > 0 ? encode(&args->up_weight, term.up_weight, term.up_k)
                                    : encode(&args->up_weight, term.weight, term.k)));
}

// Returns the number of blocks of k that the term adds.
inline int low_rank_blocks(const GemmProblem& p) {
  const LowRank& term = p.low_rank;
  return p.pair() ? ceil_div(term.k, kBlockK) + ceil_div(term.up_k, kBlockK) : ceil_div(term.columns(), kBlockK);
}

}  // namespace fused_mlp::sm90
