// Adapters of a mixture's experts: their factors in the layout that the GEMMs use, and their low-rank terms.
#pragma once

#include <vector>

#include "expert_operands.h"
#include "rows/stack_copies.h"

namespace fused_mlp {

// The factors of a layer's adapter, both or neither: a [groups, rank, k] and b [groups, n, rank], with a multiple of
// kRankStep ranks. A group is an expert, or, if rows are not sorted, a slot. For products that read weights in their
// own layout, b is [groups, rank, n].
struct RankFactors {
  OptionalTensor a, b;

  explicit operator bool() const { return a.has_value(); }
};

constexpr int64_t kRankStep = 8;

inline Stack stack_of(const Tensor& tensor, bool transposed = false) {
  const int row = transposed ? 2 : 1, column = transposed ? 1 : 2;
  return {const_cast<void*>(tensor.const_data_ptr()),
          weight_type(tensor),
          {tensor.stride(0), tensor.stride(row), tensor.stride(column)}};
}

// Adapters as passed by the caller: a [experts, rank, in] and b [experts, out, rank] with any strides, in float32 or
// the dtype of x, and the scaling of their products. An a that already has the layout of the products is not copied.
class ExpertAdapters {
 public:
  ExpertAdapters(const std::vector<OptionalTensor>& factors, const std::vector<double>& scalings, const Tensor& like,
                 const Routes& routes, const Tensor& gate_up_weight, const Tensor& down_weight, bool transposed = false)
      : factors_(factors), scalings_(scalings), like_(like), routes_(routes), transposed_(transposed) {
    STD_TORCH_CHECK(factors.empty() || (factors.size() == 4 && scalings.size() == 2), "factors must be two per layer");
    for (size_t layer = 0; 2 * layer < factors.size(); ++layer) {
      const Tensor& weight = layer == 0 ? gate_up_weight : down_weight;
      STD_TORCH_CHECK(a(layer).has_value() == b(layer).has_value(), "factors must be two per layer");
      if (!has(layer)) continue;
      for (const Tensor* factor : {&*a(layer), &*b(layer)}) {
        const ScalarType type = factor->scalar_type();
        STD_TORCH_CHECK(factor->dim() == 3 && factor->size(0) == routes.experts && factor->device() == like.device() &&
                            (type == ScalarType::Float || type == like.scalar_type()),
                        "factors must be [experts, ., .], in the dtype of x or in float32, on its device");
      }
      STD_TORCH_CHECK(a(layer)->size(1) == b(layer)->size(2) && a(layer)->size(1) > 0 &&
                          b(layer)->size(1) == weight.size(transposed ? 2 : 1) &&
                          a(layer)->size(2) == weight.size(transposed ? 1 : 2),
                      "factors must fit the weights");
    }
  }

  bool has(size_t layer) const { return !factors_.empty() && a(layer).has_value(); }
  bool any() const { return has(0) || has(1); }
  int64_t rank(size_t layer) const { return a(layer)->size(1); }

  // The factors of both layers: a, and b times the scaling, transposed if weights are. `of_slots`: only those of the
  // slots' experts.
  std::pair<RankFactors, RankFactors> for_forward(bool of_slots, cudaStream_t stream) const {
    StackCopies copies{};
    if (of_slots) copies.of_slots = routes_;
    const int64_t groups = of_slots ? routes_.slots() : routes_.experts;
    const auto factors = [&](size_t layer) -> RankFactors {
      if (!has(layer)) return {};
      const int64_t ranks = in_steps(rank(layer), kRankStep);
      const double scale = scalings_[layer];
      return {!of_slots && lies_right(*a(layer))
                  ? *a(layer)
                  : copied(copies, *a(layer), false, {groups, ranks, a(layer)->size(2)}, 1.0),
              transposed_ ? copied(copies, *b(layer), true, {groups, ranks, b(layer)->size(1)}, scale)
                          : copied(copies, *b(layer), false, {groups, b(layer)->size(1), ranks}, scale)};
    };
    std::pair<RankFactors, RankFactors> found{factors(0), factors(1)};
    check(launch_stack_copies(copies, stream));
    return found;
  }

  // For the gradients of the layers' inputs: b transposed, times the scaling, and a in its own layout, unless weights
  // are transposed.
  std::pair<RankFactors, RankFactors> for_backward(cudaStream_t stream) const {
    StackCopies copies{};
    const auto factors = [&](size_t layer) -> RankFactors {
      if (!has(layer)) return {};
      const Tensor &of_a = *a(layer), &of_b = *b(layer);
      const int64_t groups = routes_.experts, ranks = in_steps(rank(layer), kRankStep);
      return {copied(copies, of_b, true, {groups, ranks, of_b.size(1)}, scalings_[layer]),
              transposed_        ? copied(copies, of_a, true, {groups, of_a.size(2), ranks}, 1.0)
              : lies_right(of_a) ? of_a
                                 : copied(copies, of_a, false, {groups, ranks, of_a.size(2)}, 1.0)};
    };
    std::pair<RankFactors, RankFactors> found{factors(0), factors(1)};
    check(launch_stack_copies(copies, stream));
    return found;
  }

  // A layer's a, by which rows are multiplied.
  Tensor copied_a(size_t layer, cudaStream_t stream) const {
    if (lies_right(*a(layer))) return *a(layer);
    StackCopies copies{};
    const Tensor found =
        copied(copies, *a(layer), false, {routes_.experts, in_steps(rank(layer), kRankStep), a(layer)->size(2)}, 1.0);
    check(launch_stack_copies(copies, stream));
    return found;
  }

  // The factor for the gradient of a or b: rows that were multiplied by b include the scaling, those by a do not.
  double scaling(size_t layer, bool of_a) const { return of_a ? 1.0 : scalings_[layer]; }

  // A gradient [experts, rank, in or out] in the layout of its factor.
  Tensor gradient(const Tensor& found, size_t layer, bool of_a, cudaStream_t stream) const {
    const Tensor& factor = of_a ? *a(layer) : *b(layer);
    if (of_a && lies_right(factor)) return found;
    const Tensor out = new_strided(factor, factor.sizes(), strides_like(factor));
    StackCopies copies{};
    copies.count = 1;
    copies.copies[0] = copy(found, !of_a, out, 1.0);
    check(launch_stack_copies(copies, stream));
    return out;
  }

 private:
  const OptionalTensor& a(size_t layer) const { return factors_[2 * layer]; }
  const OptionalTensor& b(size_t layer) const { return factors_[2 * layer + 1]; }
  // True if an a has the layout that the products use.
  bool lies_right(const Tensor& factor) const {
    return factor.scalar_type() == like_.scalar_type() && factor.is_contiguous() && factor.size(1) % kRankStep == 0 &&
           aligned(factor);
  }
  static int64_t in_steps(int64_t rank, int64_t step) { return ceil_div(rank, step) * step; }

  static StackCopy copy(const Tensor& from, bool transposed, const Tensor& to, double scale) {
    StackCopy made{stack_of(from, transposed), stack_of(to)};
    for (int d = 0; d < 3; ++d) made.sizes[d] = static_cast<int>(to.size(d));
    made.from_rows = static_cast<int>(from.size(transposed ? 2 : 1));
    made.from_columns = static_cast<int>(from.size(transposed ? 1 : 2));
    made.scale = static_cast<float>(scale);
    return made;
  }

  Tensor copied(StackCopies& copies, const Tensor& from, bool transposed, std::vector<int64_t> sizes,
                double scale) const {
    const Tensor to = new_dense(like_, sizes);
    copies.copies[copies.count++] = copy(from, transposed, to, scale);
    return to;
  }

  // The strides of a factor without gaps, or otherwise of one with adjacent rows.
  static std::vector<int64_t> strides_like(const Tensor& factor) {
    int order[3] = {0, 1, 2};
    std::sort(order, order + 3, [&](int i, int j) {
      return std::pair(factor.stride(i), factor.size(i)) < std::pair(factor.stride(j), factor.size(j));
    });
    int64_t next = 1;
    std::vector<int64_t> strides(3);
    for (int d : order) {
      if (factor.size(d) > 1 && factor.stride(d) != next) return dense_strides(factor.sizes());
      strides[d] = next;
      next *= factor.size(d);
    }
    return strides;
  }

  const std::vector<OptionalTensor>& factors_;
  const std::vector<double>& scalings_;
  const Tensor& like_;
  const Routes& routes_;
  const bool transposed_;  // of the weights
};

// Adds to a layer's product the term of rows [., rank] and b. The rows belong to slots, or are sorted like those of a.
inline void add_term(GroupedProblem& p, const Tensor& rows, const Tensor& b, int parts, bool in_turns,
                     bool as_it_lies = false) {
  const GroupedProblem term = ExpertLayer{b, {}, parts, in_turns, as_it_lies}.problem(p.routes, p.gemm.dtype, 1);
  const int64_t rank = rows.size(1);
  p.gemm.low_rank.rows = {const_cast<void*>(rows.const_data_ptr()), rank};
  p.gemm.low_rank.weight = term.gemm.weight;
  p.gemm.low_rank.up_weight = term.gemm.up_weight;
  p.gemm.low_rank.k = rank;
  if (parts == 2) p.gemm.low_rank.up_k = rank;
  p.low_rank_rows = term.weight_rows;
  p.low_rank_of_slots = b.size(0) != p.routes.experts;
}

}  // namespace fused_mlp
