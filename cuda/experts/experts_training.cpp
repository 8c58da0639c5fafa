// Training of a mixture's experts on a GPU. The forward is the same as in inference, and keeps the sorted rows of x and
// the values before the activation. The backward sorts the rows of the result's gradient without multiplying them by
// their routing weights. The product with the down weights applies these weights to its sums, when it computes the
// gradients of gate and up and recomputes the hidden values. Nothing waits for the host, and every sum has a fixed
// order.
//
// Experts whose gates and ups are not concatenated, or which have biases or limits, use plain products with a kernel
// between them (training/gates.cuh). So do all experts if an architecture requires it.
//
// An adapter's rows are a product of few columns. They add a low-rank term to the layer's own product, also in the
// backward, where the factors swap roles.
#include <torch/csrc/stable/ops.h>

#include <vector>

#include "../../torch-ext/operands/activation.h"
#include "../../torch-ext/operands/operands.h"
#include "expert_adapters.h"
#include "training/steps.h"

namespace fused_mlp {
namespace {

// The gradients that are required.
enum Needs {
  kOfX = 1,
  kOfWeights = 2,
  kOfGateUp = 4,
  kOfDown = 8,
  kOfGateUpA = 16,
  kOfGateUpB = 32,
  kOfDownA = 64,
  kOfDownB = 128,
  kOfGateUpBias = 256,
  kOfDownBias = 512,
  kOfSums = 1024,   // of the values before the activation, concatenated
  kBySums = 2048,   // these are given, instead of `gate_up`
  kOfTokens = 4096  // the tokens are given, instead of `sorted`
};

// The layout of the weights, and the operation between the products; operands.h says what is supported.
struct Form {
  int64_t activation;
  bool gated, interleaved, transposed;
  std::optional<double> limit;
  double up_offset;

  // True if the products have epilogues for it, provided that there are no biases.
  bool is_fused() const { return gated && !interleaved && !transposed && !limit && up_offset == 0.0; }
};

struct ExpertWeights {
  const Tensor &gate_up, &down;
  const OptionalTensor &gate_up_bias, &down_bias;
};

// The term that an adapter adds to a product: rows [., rank], and the weights by which they are multiplied.
struct Term {
  Tensor rows, weight;
};
using OptionalTerm = std::optional<Term>;

void check_trained(const Tensor& x, const Tensor& top_k_index, const Tensor& top_k_weights, const ExpertWeights& given,
                   const Form& form) {
  check_experts(x, top_k_index, top_k_weights, given.gate_up, given.down, given.gate_up_bias, given.down_bias,
                form.activation, form.gated, form.interleaved, form.transposed, form.limit, form.up_offset);
  STD_TORCH_CHECK(dtype_of(x, "x") != DType::kFloat32, "x must be bfloat16 or float16");
  check_size(top_k_index.numel(), given.gate_up.size(0));
  const int in = form.transposed ? 1 : 2;
  STD_TORCH_CHECK(given.down.size(3 - in) == given.gate_up.size(in),
                  "experts must have the same number of outputs as inputs");
  STD_TORCH_CHECK(top_k_index.numel() > 0, "top_k_index must not be empty");
}

Matrix matrix(const Tensor& rows, int64_t first_column = 0) {
  return {static_cast<char*>(const_cast<void*>(rows.const_data_ptr())) + first_column * 2, rows.stride(0)};
}

Tensor aligned_weight(const Tensor& weight) { return aligned(weight) ? weight : torch::stable::clone(weight); }

// Biases whose rows are adjacent vectors.
OptionalTensor aligned_bias(const OptionalTensor& bias) {
  if (!bias) return std::nullopt;
  const Tensor dense = torch::stable::contiguous(*bias);
  return aligned(dense) ? dense : torch::stable::clone(dense);
}

// A call's operands, the lists of its sorted rows, and the steps of the call.
class TrainedExperts {
 public:
  TrainedExperts(const Tensor& x, const Tensor& top_k_index, const Tensor& top_k_weights, const ExpertWeights& given,
                 const Form& form)
      : like_(x),
        index_(torch::stable::contiguous(top_k_index)),
        weights_(torch::stable::contiguous(top_k_weights)),
        gate_up_(aligned_weight(given.gate_up)),
        down_(aligned_weight(given.down)),
        gate_up_bias_(aligned_bias(given.gate_up_bias)),
        down_bias_(aligned_bias(given.down_bias)),
        form_(form),
        experts_(given.gate_up.size(0)),
        features_(given.gate_up.size(form.transposed ? 1 : 2)),
        hidden_(given.down.size(form.transposed ? 1 : 2)),
        width_(form.gated ? 2 * hidden_ : hidden_),
        dtype_(dtype_of(x, "x")),
        routes_(routes_of(index_, experts_)),
        kernels_(ExpertKernels::of_training(x)),
        fuses_(kernels_.kernels.fuses_in_training && form.is_fused() && !given.gate_up_bias && !given.down_bias),
        plan_(kernels_.kernels.plan_training(routes_)),
        stream_(current_stream(x)),
        // Lists of int and of float, counted in 16-bit elements.
        lists_(new_dense(x, {2 * (4 * plan_.row_tiles + routes_.slots() + blocks() + 2 + 2 * experts_)})),
        row_weights_(new_dense(x, {2 * rows()})) {
    tiles_ = static_cast<FittedTile*>(lists_.mutable_data_ptr());
    row_of_slot_ = reinterpret_cast<int*>(tiles_ + plan_.row_tiles);
    codes_ = row_of_slot_ + routes_.slots();
    counts_ = codes_ + blocks();
    ranges_ = reinterpret_cast<RowRange*>(counts_ + 2);
  }

  // Makes the next sort record the token of each row.
  void list_tokens() { tokens_.emplace(new_dense(like_, {2 * rows()})); }

  // The tokens' rows, sorted by expert.
  Tensor sorted(const Tensor& x) const {
    const TensorRows from = addressable_rows(x);
    const Tensor to = new_rows(features_);
    RowSort sort = lists_of_sort();
    sort.x = fused_mlp::matrix(from);
    sort.sorted = to.mutable_data_ptr();
    sort.training = {weights_.const_data_ptr(), weight_type(weights_),
                     static_cast<float*>(row_weights_.mutable_data_ptr())};
    check(launch_row_sort(sort, kernels_.gpu, stream_));
    return to;
  }

  // Makes only the lists of sorted rows.
  void list_rows() const { check(launch_row_sort(lists_of_sort(), kernels_.gpu, stream_)); }

  // Rows times the transpose of the first `rank` rows of every expert's factor; zeros in rows that are not filled.
  Tensor rank_rows(const Tensor& rows, const Tensor& factor, int64_t rank) const {
    const Tensor out = new_rows(rank);
    check(cudaMemsetAsync(out.mutable_data_ptr(), 0, static_cast<size_t>(out.numel()) * 2, stream_));
    GroupedProblem p = problem(factor, 1, false, Product::kPlain, rows);
    p.gemm.n = rank;
    return launched(p, out);
  }

  OptionalTerm term(const Tensor& rows, const RankFactors& factors) const {
    if (!factors) return std::nullopt;
    return Term{rank_rows(rows, *factors.a, factors.a->size(1)), *factors.b};
  }

  // Fills `gate_up` with the values before the activation, biases included.
  Tensor hidden(const Tensor& sorted, const Tensor& gate_up, const OptionalTerm& term) const {
    if (!fuses_) {
      product(sorted, gate_up_, form_.transposed, gate_up, gate_up_bias_, term);
      const Tensor out = new_rows(hidden_);
      check(launch_expert_gates(gates(gate_up, out), rows(), stream_));
      return out;
    }
    GroupedProblem p = problem(gate_up_, 2, false, Product::kGatedKept, sorted);
    if (term) add_term(p, term->rows, term->weight, 2, false);
    p.gemm.training.gate = matrix(gate_up);
    p.gemm.training.up = matrix(gate_up, hidden_);
    return launched(p, new_rows(hidden_));
  }

  Tensor result(const Tensor& hidden, const OptionalTerm& term) const {
    const Tensor rows = product(hidden, down_, form_.transposed, new_rows(features_), down_bias_, term);
    return summed(rows, weights_.const_data_ptr());
  }

  // Fills `gate_up_gradient`, and returns the hidden values times their routing weights. `row_sums` are partial sums of
  // the gradients of these weights.
  Tensor differentiated(const Tensor& grad, const Tensor& gate_up, const Tensor& gate_up_gradient,
                        const Tensor& row_sums, const OptionalTerm& term) const {
    if (!fuses_) {
      const Tensor hidden = product(grad, down_, !form_.transposed, new_rows(hidden_), {}, term);
      ExpertGateGradients made{gates(gate_up, hidden)};
      made.gradient = hidden.const_data_ptr();
      made.gate_up_gradient = gate_up_gradient.mutable_data_ptr();
      made.row_weights = static_cast<const float*>(row_weights_.const_data_ptr());
      made.row_sums = static_cast<float*>(row_sums.mutable_data_ptr());
      made.result_gradient = grad.const_data_ptr();
      made.down_bias = down_bias_ ? down_bias_->const_data_ptr() : nullptr;
      made.features = static_cast<int>(features_);
      check(launch_expert_gate_gradients(made, rows(), stream_));
      return hidden;
    }
    GroupedProblem p = problem(down_, 1, true, Product::kGatedGradient, grad);
    if (term) add_term(p, term->rows, term->weight, 1, false, true);
    p.gemm.training.gate = matrix(gate_up);
    p.gemm.training.up = matrix(gate_up, hidden_);
    p.gemm.training.gate_gradient = matrix(gate_up_gradient);
    p.gemm.training.up_gradient = matrix(gate_up_gradient, hidden_);
    p.training.row_weights = static_cast<const float*>(row_weights_.const_data_ptr());
    p.training.row_sums = static_cast<float*>(row_sums.mutable_data_ptr());
    return launched(p, new_rows(hidden_));
  }

  Tensor input_gradient(const Tensor& gate_up_gradient, const OptionalTerm& term) const {
    const Tensor rows = product(gate_up_gradient, gate_up_, !form_.transposed, new_rows(features_), {}, term);
    return summed(rows, nullptr);
  }

  Tensor weight_gradient(const Tensor& row_sums) const {
    const Tensor out = new_dense(weights_, weights_.sizes());
    check(launch_weight_gradient({routes_, static_cast<const float*>(row_sums.const_data_ptr()), row_sum_parts(),
                                  row_of_slot_, out.mutable_data_ptr(), weight_type(weights_)},
                                 kernels_.gpu, stream_));
    return out;
  }

  // Every expert's out^T in, transposed if the weights are.
  Tensor outer_of_weight(const Tensor& out, const Tensor& in) const {
    return form_.transposed ? outer(in, out) : outer(out, in);
  }

  // Every expert's sum of rows, weighted or not.
  Tensor bias_gradient(const Tensor& rows, bool weighted) const {
    const Tensor out = new_dense(like_, {experts_, rows.size(1)});
    check(launch_expert_sums(
        {ranges_, static_cast<int>(experts_), rows.const_data_ptr(), static_cast<int>(rows.size(1)),
         weighted ? static_cast<const float*>(row_weights_.const_data_ptr()) : nullptr, out.mutable_data_ptr(), dtype_},
        stream_));
    return out;
  }

  // Every expert's a^T b.
  Tensor outer(const Tensor& a, const Tensor& b) const {
    const Tensor out = new_dense(like_, {experts_, a.size(1), b.size(1)});
    GroupedProblem p{};
    p.gemm = {.a = matrix(a), .weight = matrix(b), .m = a.size(1), .n = b.size(1), .dtype = dtype_};
    p.gemm.out = {out.mutable_data_ptr(), b.size(1)};
    p.outer = true;
    p.routes = routes_;
    p.blocks.rows = ranges_;
    p.training.experts = static_cast<int>(experts_);
    check(kernels_.kernels.launch_training(p, plan_, kernels_.gpu, stream_));
    return out;
  }

  // The gradient of a factor: every expert's rows^T wide, [experts, ranks, columns of wide]. `wide` are sorted rows, or
  // tokens if `of_tokens`.
  Tensor outer_factor(const Tensor& wide, bool of_tokens, const Tensor& rows, int64_t ranks, double scale) const {
    const TensorRows from = addressable_rows(wide);
    const Tensor out = new_dense(like_, {experts_, ranks, from.cols});
    const OuterFactor product{.x = fused_mlp::matrix(from),
                              .grads = matrix(rows),
                              .out = {out.mutable_data_ptr(), from.cols},
                              .rows = this->rows(),
                              .cols = from.cols,
                              .ranks = ranks,
                              .scale = static_cast<float>(scale),
                              .dtype = dtype_,
                              .kept = {},
                              .ranges = ranges_,
                              .count = static_cast<int>(experts_),
                              .row_of = of_tokens ? static_cast<const int*>(tokens_->const_data_ptr()) : nullptr};
    check(kernels_.architecture->dropped->outer(product, kernels_.gpu.multiprocessors, stream_));
    return out;
  }

  // Checks that a tensor was kept by the forward and has this number of columns.
  void check_kept(const Tensor& kept, int64_t columns, const char* name) const {
    check_same_kind(kept, name, like_);
    STD_TORCH_CHECK(kept.dim() == 2 && kept.size(0) == rows() && kept.size(1) == columns && kept.stride(0) == columns &&
                        kept.stride(1) == 1,
                    name, " must be what the forward returned");
  }
  void check_kept(const OptionalTensor& sorted, const Tensor& gate_up) const {
    if (sorted) check_kept(*sorted, features_, "sorted");
    check_kept(gate_up, width_, "gate_up");
  }

  ExpertAdapters adapters(const std::vector<OptionalTensor>& factors, const std::vector<double>& scalings) const {
    const ExpertAdapters found(factors, scalings, like_, routes_, gate_up_, down_, form_.transposed);
    STD_TORCH_CHECK(!found.any() || kernels_.kernels.adds_low_rank, "no kernel supports adapters for these experts");
    return found;
  }

  cudaStream_t stream() const { return stream_; }
  Tensor new_gate_up() const { return new_rows(width_); }
  Tensor new_row_sums() const { return new_dense(like_, {rows() * row_sum_parts() * 2}); }  // in float32

 private:
  int64_t rows() const { return plan_.sorted_rows; }
  int64_t blocks() const { return rows() / kTiledBlock; }
  RowSort lists_of_sort() const {
    RowSort sort{.routes = routes_,
                 .k = features_,
                 .block_rows = kTiledBlock,
                 .row_of_slot = row_of_slot_,
                 .codes = codes_,
                 .count = counts_};
    sort.rows = ranges_;
    sort.tiles = tiles_;
    sort.tile_count = counts_ + 1;
    sort.tile_rows = plan_.rows;
    if (tokens_) sort.token_of_row = static_cast<int*>(tokens_->mutable_data_ptr());
    return sort;
  }
  int row_sum_parts() const { return fuses_ ? static_cast<int>(ceil_div(hidden_, kRowSumColumns)) : 1; }
  Tensor new_rows(int64_t columns) const { return new_dense(like_, {rows(), columns}); }

  GroupedProblem problem(const Tensor& weight, int parts, bool as_it_lies, Product kind, const Tensor& a,
                         const OptionalTensor& bias = {}) const {
    GroupedProblem p = ExpertLayer{weight, bias, parts, false, as_it_lies}.problem(routes_, dtype_, 1);
    p.gemm.kind = kind;
    p.gemm.a = matrix(a);
    p.gemm.epilogue.activation = is_training(kind) ? form_.activation : static_cast<int64_t>(Activation::kLinear);
    p.blocks = {codes_, counts_, ranges_};
    p.fitted = {tiles_, counts_ + 1};
    return p;
  }

  // Rows times weights [n, k], or [k, n] read in their own layout.
  Tensor product(const Tensor& rows, const Tensor& weight, bool as_it_lies, Tensor out, const OptionalTensor& bias = {},
                 const OptionalTerm& term = {}) const {
    GroupedProblem p = problem(weight, 1, as_it_lies, as_it_lies ? Product::kPair : Product::kPlain, rows, bias);
    if (term) add_term(p, term->rows, term->weight, 1, false, as_it_lies);
    return launched(p, out);
  }

  ExpertGates gates(const Tensor& gate_up, const Tensor& hidden) const {
    const float limit = form_.limit ? static_cast<float>(*form_.limit) : std::numeric_limits<float>::infinity();
    return {{codes_, counts_, ranges_},
            form_.activation,
            form_.gated,
            form_.interleaved,
            {limit, static_cast<float>(form_.up_offset)},
            static_cast<int>(hidden_),
            gate_up.const_data_ptr(),
            hidden.mutable_data_ptr(),
            dtype_};
  }

  Tensor launched(GroupedProblem p, Tensor out) const {
    p.gemm.out = matrix(out);
    check(kernels_.kernels.launch_training(p, plan_, kernels_.gpu, stream_));
    return out;
  }

  Tensor summed(const Tensor& rows, const void* weights) const {
    const Tensor out = new_dense(like_, {routes_.tokens, features_});
    check(launch_sum({routes_, rows.const_data_ptr(), row_of_slot_, weights, weight_type(weights_),
                      out.mutable_data_ptr(), static_cast<int>(features_), dtype_},
                     kernels_.gpu, stream_));
    return out;
  }

  const Tensor like_, index_, weights_, gate_up_, down_;
  OptionalTensor tokens_;  // of int, one for each row
  const OptionalTensor gate_up_bias_, down_bias_;
  const Form form_;
  const int64_t experts_, features_, hidden_, width_;
  const DType dtype_;
  const Routes routes_;
  const ExpertKernels kernels_;
  const bool fuses_;  // the products' epilogues compute what is between them
  const GroupedPlan plan_;
  const cudaStream_t stream_;
  const Tensor lists_, row_weights_;
  FittedTile* tiles_;
  int *row_of_slot_, *codes_, *counts_;  // two counts: blocks and tiles
  RowRange* ranges_;
};

}  // namespace

std::vector<Tensor> experts_training_forward(const Tensor& x, const Tensor& top_k_index, const Tensor& top_k_weights,
                                             const Tensor& gate_up_weight, const Tensor& down_weight,
                                             const OptionalTensor& gate_up_bias, const OptionalTensor& down_bias,
                                             const std::vector<OptionalTensor>& factors,
                                             const std::vector<double>& scalings, int64_t activation, bool gated,
                                             bool interleaved, bool transposed, std::optional<double> limit,
                                             double up_offset, bool keeps_sorted) {
  const ExpertWeights given{gate_up_weight, down_weight, gate_up_bias, down_bias};
  const Form form{activation, gated, interleaved, transposed, limit, up_offset};
  check_trained(x, top_k_index, top_k_weights, given, form);
  const DeviceGuard device_guard(x.get_device_index());
  const TrainedExperts experts(x, top_k_index, top_k_weights, given, form);
  const ExpertAdapters adapters = experts.adapters(factors, scalings);
  std::pair<RankFactors, RankFactors> ranked;
  if (adapters.any()) ranked = adapters.for_forward(false, experts.stream());
  const auto& [of_gate_up, of_down] = ranked;
  Tensor sorted = experts.sorted(x);
  const Tensor gate_up = experts.new_gate_up();
  const OptionalTerm term = experts.term(sorted, of_gate_up);
  const Tensor hidden = experts.hidden(sorted, gate_up, term);
  if (!keeps_sorted) sorted = new_dense(x, {0});  // the result's rows then use its memory
  std::vector<Tensor> kept{experts.result(hidden, experts.term(hidden, of_down)), sorted, gate_up};
  if (term) kept.push_back(term->rows);
  return kept;
}

namespace {

// The values kept by the forward.
struct Kept {
  const OptionalTensor& sorted;
  const Tensor& gate_up;
  const OptionalTensor& rank_rows;
};

std::vector<Tensor> gradients_of_experts(const Tensor& grad, const Kept& kept, const Tensor& top_k_index,
                                         const Tensor& top_k_weights, const ExpertWeights& given,
                                         const std::vector<OptionalTensor>& factors,
                                         const std::vector<double>& scalings, const Form& form, int64_t needs,
                                         bool overwrites) {
  const auto& [sorted, gate_up, rank_rows] = kept;
  check_trained(grad, top_k_index, top_k_weights, given, form);
  const DeviceGuard device_guard(grad.get_device_index());
  TrainedExperts experts(grad, top_k_index, top_k_weights, given, form);
  const bool of_tokens = needs & kOfTokens;
  experts.check_kept(of_tokens ? std::nullopt : sorted, gate_up);
  if (of_tokens) {
    STD_TORCH_CHECK(sorted && !(needs & kOfGateUp),
                    "sorted must be the tokens, or their rows for gradients of weights");
    check_same_kind(*sorted, "sorted", grad);
    STD_TORCH_CHECK(sorted->dim() == 2 && sorted->size(0) == grad.size(0) && sorted->size(1) == grad.size(1),
                    "sorted must have the shape and dtype of grad");
    experts.list_tokens();
  }
  const ExpertAdapters adapters = experts.adapters(factors, scalings);
  std::pair<RankFactors, RankFactors> ranked;
  if (adapters.any()) ranked = adapters.for_backward(experts.stream());
  const auto& [of_gate_up, of_down] = ranked;
  STD_TORCH_CHECK((of_gate_up && rank_rows) || !(needs & (kOfGateUpA | kOfGateUpB)), "gate_up_factors are required");
  STD_TORCH_CHECK(sorted || !(needs & (kOfGateUp | kOfGateUpA)), "sorted is required");
  STD_TORCH_CHECK(of_down || !(needs & (kOfDownA | kOfDownB)), "down_factors are required");
  constexpr int64_t kBehindSums = kOfX | kOfGateUp | kOfGateUpA | kOfGateUpB | kOfGateUpBias;
  STD_TORCH_CHECK(!(needs & kBySums) || !(needs & ~(kBySums | kBehindSums)),
                  "needs must be of what follows from the gradients of gate_up");
  const bool is_differentiated = needs & kBySums;
  const Tensor gate_up_gradient = overwrites || is_differentiated ? gate_up : experts.new_gate_up();
  OptionalTensor down, down_a, down_b, down_bias;
  const auto gradient = [&](const Tensor& wide, const Tensor& rows, size_t layer, bool of_a) {
    const bool gathers = of_tokens && of_a && layer == 0;
    const double scale = adapters.scaling(layer, of_a);
    const Tensor found = experts.outer_factor(wide, gathers, rows, adapters.rank(layer), scale);
    return adapters.gradient(found, layer, of_a, experts.stream());
  };
  OptionalTensor sums;
  if (is_differentiated) {
    experts.list_rows();
  } else {  // uses the gradient's rows and the hidden values, which are freed before the next product needs memory
    sums = experts.new_row_sums();
    const Tensor rows = experts.sorted(grad);
    const OptionalTerm term = experts.term(rows, of_down);
    const Tensor hidden = experts.differentiated(rows, gate_up, gate_up_gradient, *sums, term);
    if (needs & kOfDownBias) down_bias = experts.bias_gradient(rows, true);
    if (needs & kOfDown) down = experts.outer_of_weight(rows, hidden);
    if (needs & kOfDownA) down_a = gradient(hidden, term->rows, 1, true);
    if (needs & kOfDownB) {
      const Tensor a = form.transposed ? adapters.copied_a(1, experts.stream()) : *of_down.b;
      const Tensor of_hidden = experts.rank_rows(hidden, a, of_down.a->size(1));
      down_b = gradient(rows, of_hidden, 1, false);
    }
  }
  OptionalTerm term;
  if (needs & (kOfX | kOfGateUpA)) term = experts.term(gate_up_gradient, of_gate_up);
  std::vector<Tensor> found;
  if (needs & kOfX) found.push_back(experts.input_gradient(gate_up_gradient, term));
  if (needs & kOfWeights) found.push_back(experts.weight_gradient(*sums));
  if (needs & kOfGateUp) found.push_back(experts.outer_of_weight(gate_up_gradient, *sorted));
  if (down) found.push_back(*down);
  if (needs & kOfGateUpA) found.push_back(gradient(*sorted, term->rows, 0, true));
  if (needs & kOfGateUpB) {
    experts.check_kept(*rank_rows, of_gate_up.a->size(1), "rank_rows");
    found.push_back(gradient(gate_up_gradient, *rank_rows, 0, false));
  }
  if (down_a) found.push_back(*down_a);
  if (down_b) found.push_back(*down_b);
  if (needs & kOfGateUpBias) found.push_back(experts.bias_gradient(gate_up_gradient, false));
  if (down_bias) found.push_back(*down_bias);
  if (needs & kOfSums) found.push_back(gate_up_gradient);
  return found;
}

}  // namespace

std::vector<Tensor> experts_training_backward(const Tensor& grad, const OptionalTensor& sorted, const Tensor& gate_up,
                                              const Tensor& top_k_index, const Tensor& top_k_weights,
                                              const Tensor& gate_up_weight, const Tensor& down_weight,
                                              const OptionalTensor& gate_up_bias, const OptionalTensor& down_bias,
                                              const std::vector<OptionalTensor>& factors,
                                              const std::vector<double>& scalings, const OptionalTensor& rank_rows,
                                              int64_t activation, bool gated, bool interleaved, bool transposed,
                                              std::optional<double> limit, double up_offset, int64_t needs) {
  return gradients_of_experts(grad, {sorted, gate_up, rank_rows}, top_k_index, top_k_weights,
                              {gate_up_weight, down_weight, gate_up_bias, down_bias}, factors, scalings,
                              {activation, gated, interleaved, transposed, limit, up_offset}, needs, false);
}

std::vector<Tensor> experts_training_backward_(const Tensor& grad, const OptionalTensor& sorted, const Tensor& gate_up,
                                               const Tensor& top_k_index, const Tensor& top_k_weights,
                                               const Tensor& gate_up_weight, const Tensor& down_weight,
                                               const OptionalTensor& gate_up_bias, const OptionalTensor& down_bias,
                                               const std::vector<OptionalTensor>& factors,
                                               const std::vector<double>& scalings, const OptionalTensor& rank_rows,
                                               int64_t activation, bool gated, bool interleaved, bool transposed,
                                               std::optional<double> limit, double up_offset, int64_t needs) {
  return gradients_of_experts(grad, {sorted, gate_up, rank_rows}, top_k_index, top_k_weights,
                              {gate_up_weight, down_weight, gate_up_bias, down_bias}, factors, scalings,
                              {activation, gated, interleaved, transposed, limit, up_offset}, needs, true);
}

}  // namespace fused_mlp
