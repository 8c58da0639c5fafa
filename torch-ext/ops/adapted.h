#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include "../operands/activation.h"
#include "../operands/operands.h"
#include "../torch_binding.h"
#include "backward.h"
#include "quantized.h"
#include "torch_gemm.h"

// Layers with low-rank adapters, forward and backward: x weight^T + bias + rows b^T, where rows = scaling x a^T.
// torch's GEMMs compute the products of few columns; a backend may add rows b^T inside the layer's own product.
namespace fused_mlp {

// Bits of `needs`: the required gradients. Those of the first layer, up and the second are consecutive.
enum AdaptedOperand { kOfX = 0, kOfWeights = 1, kOfBiases = 4, kOfA = 7, kOfB = 10, kAdaptedOperands = 13 };

struct AdaptedLayer {
  Tensor weight;
  OptionalTensor bias, a, b;
  double scaling, dropout;
  const PackedWeight* packed = nullptr;  // of a quantised weight, for which `weight` has only the shape

  // The weight; a quantised one is decoded on each call, and lives as long as a product needs it.
  Tensor values() const { return packed == nullptr ? weight : decoded(*packed, weight, weight.scalar_type()); }
  float scale_of_kept() const { return 1.0f / static_cast<float>(1.0 - dropout); }
  int64_t rank() const { return a ? a->size(0) : 0; }
};

// A term that a product adds to its sums. The first columns of `rows` are multiplied by weight^T, [n, k], and those
// from up_column, in a gated product, by up_weight^T, [n, up_k]. In a product that reads weights in their own layout,
// they are [k, n] and [up_k, n], and both terms are added to the same result.
struct LowRankTerm {
  OptionalTensor rows, weight, up_weight;
  int64_t up_column = 0;
  // The mask of a dropout, if gradients pass one: it applies to the term, which is also scaled.
  OptionalTensor mask;
  float scale = 1.0f;

  explicit operator bool() const { return rows.has_value(); }
};

constexpr int kMostLayers = 3;

// By position of a layer, if it has a dropout: int32 [rows, words], in which bit c % 32 of word c / 32 of a row is set
// if column c of the adapter's input was kept. The rest was dropped.
using Masks = std::array<OptionalTensor, kMostLayers>;

// The values that a forward keeps for its backward: gate and up before the activation, and the rows of the adapters of
// the first layer and of the second.
struct KeptOfAdapted {
  OptionalTensor gate, up, first_rows, second_rows;
  Masks masks;
};

// How dropouts before adapters draw random numbers: like torch's dropout for an input with this layout, in the layers'
// dtype or, if `wide`, in float32; gate before up, or `up_first`. If the numbers are already reserved, `numbers`
// identifies them: the seed, the number of threads of torch's kernel, and the first number of each position.
struct Drawing {
  bool wide, up_first;
  const std::vector<int64_t>& numbers;

  bool is_taken() const { return !numbers.empty(); }
  uint64_t seed() const { return static_cast<uint64_t>(numbers[0]); }
  int64_t threads() const { return numbers[1]; }
  uint64_t offset(int place) const { return static_cast<uint64_t>(numbers[2 + place]); }
};

// The input of an adapter after dropout, as a matrix, and the mask.
struct Dropped {
  Tensor values, mask;
};

// The layers of a call, from the lists that the ops receive: first or gate, up if `gated`, and the second or down of an
// MLP.
struct AdaptedLayers {
  std::optional<AdaptedLayer> first, up, second;

  AdaptedLayers(const std::vector<Tensor>& weights, const std::vector<OptionalTensor>& biases,
                const std::vector<OptionalTensor>& a, const std::vector<OptionalTensor>& b,
                const std::vector<double>& scalings, const std::vector<double>& dropouts, bool gated) {
    const size_t least = gated ? 2 : 1, count = weights.size();
    STD_TORCH_CHECK(count == least || count == least + 1, "weights must have one element per layer");
    STD_TORCH_CHECK(biases.size() == count && a.size() == count && b.size() == count && scalings.size() == count &&
                        dropouts.size() == count,
                    "biases, a, b, scalings and dropouts must have the same number of elements as weights");
    const auto layer = [&](size_t i) {
      STD_TORCH_CHECK(a[i].has_value() == b[i].has_value(), "an adapter must have both a and b");
      STD_TORCH_CHECK(dropouts[i] >= 0 && dropouts[i] < 1, "dropouts must be at least 0 and less than 1");
      return AdaptedLayer{weights[i], biases[i], a[i], b[i], scalings[i], a[i] ? dropouts[i] : 0};
    };
    first = layer(0);
    if (gated) up = layer(1);
    if (count > least) second = layer(least);
  }

  // Quantised weights, each with its position among the layers that exist.
  void take(const std::vector<QuantizedWeight>& packed, const std::vector<int64_t>& places) {
    STD_TORCH_CHECK(places.size() == packed.size(), "places must have one element per quantised weight");
    for (size_t i = 0; i < packed.size(); ++i) {
      const bool is_up = up && places[i] == 1;
      std::optional<AdaptedLayer>& layer = places[i] == 0 ? first : is_up ? up : second;
      const PackedWeight& weight = packed[i].packed;
      STD_TORCH_CHECK(layer && layer->weight.size(0) == weight.n && layer->weight.size(1) == weight.k,
                      "a quantised weight must have the shape of its layer's weight");
      layer->packed = &weight;
    }
  }

  void check(const Tensor& x, int64_t activation) const {
    check_activation(activation);
    check_layer(*first, x.dim() > 0 ? x.size(-1) : -1, x);
    if (up) check_layer(*up, x.size(-1), x);
    STD_TORCH_CHECK(!up || up->weight.size(0) == first->weight.size(0),
                    "gate and up must have the same number of features");
    if (second) check_layer(*second, first->weight.size(0), x);
  }

  // Checks that the required gradients have operands, and that the values kept for them exist.
  void check_backward(const Tensor& grad, const OptionalTensor& x, const KeptOfAdapted& kept, int64_t needs,
                      int64_t activation) const {
    check_activation(activation);
    STD_TORCH_CHECK(grad.dim() > 0 && grad.size(-1) == features(), "grad must have the features of the result");
    if (x) {
      check_rows(*x, "x", grad, first->weight.size(1));
      check(*x, activation);
    } else {
      const auto of_first = [&](int operand) { return (needs >> operand & 3) != 0; };
      STD_TORCH_CHECK(kept.gate || (is_linear(activation) && !second), "x is required if gate is not given");
      STD_TORCH_CHECK(!of_first(kOfWeights) && !of_first(kOfA), "x is required for the gradient of a weight");
    }
    const auto needed = [&](int operand, int layer) { return (needs >> (operand + layer) & 1) != 0; };
    for (int i = 0; i < kMostLayers; ++i) {
      const std::optional<AdaptedLayer>& layer = at(i);
      const bool adapter = needed(kOfA, i) || needed(kOfB, i);
      STD_TORCH_CHECK(layer || !(adapter || needed(kOfWeights, i) || needed(kOfBiases, i)),
                      "gradients are requested of a layer that does not exist");
      STD_TORCH_CHECK(!adapter || layer->a, "gradients are requested of an adapter that does not exist");
      const OptionalTensor& rows = i == 2 ? kept.second_rows : kept.first_rows;
      STD_TORCH_CHECK(rows || !needed(kOfB, i), "rows are required for the gradient of b");
      STD_TORCH_CHECK(!layer || layer->dropout == 0 || kept.masks[i], "the mask of a dropout is required");
    }
    const bool adapted = first->a || (up && up->a);
    STD_TORCH_CHECK(kept.first_rows || kept.gate || !adapted, "rows are required if gate is not given");
    STD_TORCH_CHECK(!kept.gate || kept.up.has_value() == up.has_value(),
                    "gate and up must be given together or not at all");
    STD_TORCH_CHECK(!kept.gate || !is_linear(activation), "gate must not be given if there is no activation");
  }

  // The masks for the layers that exist.
  Masks places_of(const std::vector<OptionalTensor>& masks) const {
    Masks found;
    size_t next = 0;
    for (int place = 0; place < kMostLayers; ++place) {
      if (at(place) && next < masks.size()) found[place] = masks[next++];
    }
    return found;
  }

  // The first, up and the second.
  const std::optional<AdaptedLayer>& at(int place) const { return place == 0 ? first : place == 1 ? up : second; }
  bool drops() const { return first->dropout > 0 || (up && up->dropout > 0) || (second && second->dropout > 0); }

  int64_t hidden() const { return first->weight.size(0); }
  int64_t features() const { return second ? second->weight.size(0) : hidden(); }
  // True if the first layer's results are the values before the activation.
  bool is_linear(int64_t activation) const { return !up && static_cast<Activation>(activation) == Activation::kLinear; }

 private:
  static void check_layer(const AdaptedLayer& layer, int64_t in, const Tensor& x) {
    check_weight(layer.weight, "weight", in, x);
    check_bias(layer.bias, "bias", layer.weight, x);
    if (!layer.a) return;
    STD_TORCH_CHECK(layer.rank() > 0, "an adapter must have a rank of at least 1");
    check_weight(*layer.a, "a", in, x);
    check_weight(*layer.b, "b", layer.rank(), x);
    STD_TORCH_CHECK(layer.b->size(0) == layer.weight.size(0), "b must be [out, rank]");
  }
};

// Columns from `column`: scaling x a^T of a layer with an adapter. There is none if the layer is null.
struct RankFactorOf {
  const AdaptedLayer* layer = nullptr;
  int64_t column = 0;
};
using RankFactors = std::array<RankFactorOf, 2>;

// The values that a forward keeps for its backward, besides its operands: nothing, the rows of the adapters, or also
// the values before the activation.
enum class Keep : int64_t { kNothing, kRows, kValues };

// Backend: the requirements of backward.h, and
//   kAddsRankLast                 whether x weight^T is computed first, because there are kernels that cannot add it
//   scaled_mm(out, a, b, scale)   out = scale a b
//   rank_rows(out, x, factors, ctas_before)  the columns of `out` given by factors, in one kernel; returns its number
//                                 of CTAs, or 0 if there is no such kernel. `ctas_before` are those of the kernel that
//                                 wrote x and was launched right before, or 0
//   kDrops                        whether it has the following functions for dropouts
//   drop(x, p, wide)              x, of any leading dimensions, after torch's dropout
//   mask(out, x, mask, scale, adds)  out = scale x if it was kept, else 0; with `adds`, out += that
//   drawn_rows(rows, x, factor, drawing, place)  the columns of `rows` given by a factor, after its dropout, whose
//                                 numbers are reserved; returns the mask
//   masked_sum(out, terms)        out = the sum of terms, each masked; or false
//   masked_outer(grad, x, mask, scale)  grad^T x of the elements that were kept, scaled; or nothing
//   layer(x, first, activation, term, ctas_before)  a kernel, or none; launch(out) computes a layer of inference, and
//                                 ctas() is its number of CTAs; the previous kernel has written the rows of the term
// kept_values, hidden_gradients and input_gradient also receive a LowRankTerm.
template <typename Backend>
class Adapted {
 public:
  // `like` has the leading dimensions of x, which a backward may not need.
  Adapted(const Tensor& like, const OptionalTensor& x, const AdaptedLayers& layers, int64_t activation)
      : like_(like),
        x_(x ? OptionalTensor(Backend::rows(*x)) : std::nullopt),
        rows_(count_rows(like)),
        layers_(layers),
        activation_(activation) {
    STD_TORCH_CHECK(Backend::kDrops || !layers.drops(), "dropouts must be 0 in this build");
  }

  // Returns the result; and if anything is kept, gate and up before the activation, and the rows of the adapters of the
  // first layer and of the second. Missing values are tensors without elements. Weights are decoded before the rows of
  // adapters are computed: a kernel that starts early reads its weights while the one before it runs.
  std::vector<Tensor> forward(Keep keep, Drawing drawing) {
    OptionalTensor first_rows, gate, up, second_rows;
    Tensor out = new_dense(like_, with_features(layers_.second ? layers_.hidden() : layers_.features()));
    int64_t ctas = 0;
    {
      const FirstLayer first = first_layer();
      std::tie(first_rows, ctas) = rows_of_first(drawing);
      const bool keeps = keep == Keep::kValues && !layers_.is_linear(activation_);
      ctas = run_first(first, first_rows, ctas, keeps, flat(out), &gate, &up);
    }
    if (layers_.second) {
      const AdaptedLayer& second = *layers_.second;
      const Tensor hidden = flat(out);
      const FirstLayer last = first_layer(second);
      std::tie(second_rows, ctas) = rows_of_second(out, second.packed == nullptr ? ctas : 0, drawing);
      out = new_dense(like_, with_features(layers_.features()));
      run_layer(hidden, last, kLinear, LowRankTerm{second_rows, second.b, std::nullopt}, ctas, flat(out));
    }
    if (keep == Keep::kNothing) return {out};
    const Tensor nothing = new_dense(like_, {0});
    std::vector<Tensor> kept{out, gate.value_or(nothing), up.value_or(nothing), first_rows.value_or(nothing),
                             second_rows.value_or(nothing)};
    for (const OptionalTensor& mask : masks_) {
      if (layers_.drops()) kept.push_back(mask.value_or(nothing));
    }
    return kept;
  }

  // The gradients that `needs` requires, in the order of AdaptedOperand. Gate and up may be missing: then they are
  // recomputed.
  std::vector<Tensor> backward(const Tensor& grad, const KeptOfAdapted& kept, int64_t needs) {
    masks_ = kept.masks;
    const OptionalTensor &first_rows = kept.first_rows, &second_rows = kept.second_rows;
    OptionalTensor gate = kept.gate, up = kept.up;
    const auto needed = [&](int operand, int layer = 0) { return needs >> (operand + layer) & 1; };
    const Tensor grad_rows = Backend::rows(grad);
    const auto& second = layers_.second;
    bool first_needed = needed(kOfX);
    for (const int operand : {kOfWeights, kOfBiases, kOfA, kOfB}) {
      first_needed = first_needed || needed(operand) || needed(operand, 1);
    }
    const bool values_needed = needed(kOfWeights, 2) || needed(kOfA, 2);
    OptionalTensor values;
    if (!layers_.is_linear(activation_) && !gate && (first_needed || values_needed)) {
      make_again(first_rows, values_needed && !first_needed, &gate, &up, &values);
    }

    OptionalTensor dgate, dup, dsecond_rows;
    if (second) {
      if (second->a && (first_needed || needed(kOfA, 2))) {
        dsecond_rows = new_rank_rows(second->rank());
        Backend::scaled_mm(columns(*dsecond_rows, 0, second->rank()), grad_rows, *second->b, second->scaling);
      }
      if (needed(kOfB, 2)) put(kOfB + 2, of_weight(grad_rows, columns(*second_rows, 0, second->rank())));
      if (needed(kOfBiases, 2)) put(kOfBiases + 2, Backend::column_sums(grad_rows, std::nullopt));
      if (values_needed && !values) values = new_hidden();
      if (first_needed) {
        differentiate_second(grad_rows, dsecond_rows, gate, up, first_rows, &dgate, &dup, values);
      } else if (values_needed) {
        fill_values(gate, up, first_rows, *values);
      }
      if (needed(kOfWeights, 2)) put(kOfWeights + 2, of_weight(grad_rows, *values));
      if (needed(kOfA, 2)) {  // the last use of the values: dropout is applied in place
        put(kOfA + 2, of_a(2, columns(*dsecond_rows, 0, second->rank()), *values, true));
      }
      values.reset();
    } else if (layers_.is_linear(activation_)) {
      dgate = grad_rows;
    } else if (first_needed) {
      dgate = new_hidden();
      if (up) dup = new_hidden();
      Backend::differentiate(grad_rows, flat(*gate), flat(up), *dgate, dup, std::nullopt, activation_);
    }
    if (first_needed) differentiate_first(*dgate, dup, first_rows, needed);
    return results(needs);
  }

 private:
  static constexpr auto kLinear = static_cast<int64_t>(Activation::kLinear);

  static FirstLayer first_layer(const AdaptedLayer& layer) {
    return {layer.values(), std::nullopt, layer.bias, std::nullopt, std::nullopt};
  }
  FirstLayer first_layer() const {
    const auto& up = layers_.up;
    return {layers_.first->values(), up ? OptionalTensor(up->values()) : std::nullopt, layers_.first->bias,
            up ? up->bias : std::nullopt, std::nullopt};
  }

  // cuBLAS and the TMA need parts of rows aligned to 16 bytes.
  static constexpr int64_t kVector = 8;
  static constexpr int64_t in_vectors(int64_t columns) { return (columns + kVector - 1) / kVector * kVector; }

  int64_t up_rank() const { return layers_.up ? layers_.up->rank() : 0; }
  // The column at which up's rows start, if gate's come first.
  int64_t up_column() const { return in_vectors(layers_.first->rank()); }

  std::vector<int64_t> with_features(int64_t features) const {
    std::vector<int64_t> sizes(like_.sizes().begin(), like_.sizes().end());
    sizes.back() = features;
    return sizes;
  }
  Tensor new_hidden() const { return new_dense(like_, {rows_, layers_.hidden()}); }
  Tensor flat(const Tensor& dense) const {
    const int64_t cols = dense.size(-1);
    return matrix_view(dense, {rows_, cols}, {cols, 1});
  }
  OptionalTensor flat(const OptionalTensor& dense) const { return dense ? OptionalTensor(flat(*dense)) : std::nullopt; }

  // Memory for rows of an adapter, or for those of gate and up, with zeros between them.
  Tensor new_rank_rows(int64_t rank) const { return new_dense(like_, {rows_, in_vectors(rank)}); }
  Tensor new_first_rows() const {
    Tensor rows = new_rank_rows(up_column() + up_rank());
    if (up_rank() > 0 && layers_.first->rank() < up_column()) torch::stable::zero_(rows);
    return rows;
  }
  static Tensor columns(const Tensor& rows, int64_t first, int64_t count) {
    return matrix_view(rows, {rows.size(0), count}, {rows.stride(0), 1}, first);
  }

  // The rows of the second layer's adapter, and the number of CTAs of the kernel that writes them; without one, that of
  // the previous kernel.
  std::pair<OptionalTensor, int64_t> rows_of_second(const Tensor& hidden, int64_t ctas_before, Drawing drawing) {
    const AdaptedLayer& layer = *layers_.second;
    if (!layer.a) return {std::nullopt, ctas_before};
    const Tensor rows = new_rank_rows(layer.rank());
    if (layer.dropout > 0) return {rows, fill_rows_behind_dropout(rows, hidden, 2, 0, drawing)};
    return {rows, fill_rows(rows, flat(hidden), {RankFactorOf{&layer, 0}}, ctas_before)};
  }

  // The rows of gate's and up's adapters, side by side.
  std::pair<OptionalTensor, int64_t> rows_of_first(Drawing drawing) {
    RankFactors factors;
    if (layers_.first->a) factors[0] = {&*layers_.first, 0};
    if (up_rank() > 0) factors[1] = {&*layers_.up, up_column()};
    if (factors[0].layer == nullptr && factors[1].layer == nullptr) return {std::nullopt, 0};
    const Tensor rows = new_first_rows();
    for (const int place : {drawing.up_first ? 1 : 0, drawing.up_first ? 0 : 1}) {
      RankFactorOf& factor = factors[place];
      if (factor.layer == nullptr || factor.layer->dropout == 0) continue;
      fill_rows_behind_dropout(rows, like_, place, factor.column, drawing);
      factor = {};
    }
    return {rows, fill_rows(rows, *x_, factors, 0)};
  }

  int64_t fill_rows_behind_dropout(const Tensor& rows, const Tensor& x, int place, int64_t column, Drawing drawing) {
    if constexpr (Backend::kDrops) {
      const AdaptedLayer& layer = *layers_.at(place);
      if (drawing.is_taken()) {
        masks_[place] = Backend::drawn_rows(rows, x, {&layer, column}, drawing, place);
        return 0;
      }
      const Dropped dropped = Backend::drop(x, layer.dropout, drawing.wide);
      masks_[place] = dropped.mask;
      return fill_rows(rows, dropped.values, {RankFactorOf{&layer, column}}, 0);
    }
    return 0;
  }

  // The gradient of a layer's a, from x, or from memory for x that may be overwritten.
  Tensor of_a(int place, const Tensor& drows, const Tensor& x, bool overwrites) const {
    if (layers_.at(place)->dropout == 0) return of_weight(drows, x);
    if constexpr (Backend::kDrops) {
      const float scale = layers_.at(place)->scale_of_kept();
      if (const OptionalTensor found = Backend::masked_outer(drows, x, *masks_[place], scale)) return *found;
    }
    const Tensor room = overwrites ? x : new_dense(like_, {x.size(0), x.size(1)});
    mask(place, room, x, false);
    return of_weight(drows, room);
  }

  // out = x after the dropout of a layer, or out += that.
  void mask(int place, const Tensor& out, const Tensor& x, bool adds) const {
    if constexpr (Backend::kDrops) {
      Backend::mask(out, x, *masks_[place], layers_.at(place)->scale_of_kept(), adds);
    }
  }

  static int64_t fill_rows(const Tensor& rows, const Tensor& x, const RankFactors& factors, int64_t ctas_before) {
    const int64_t ctas = Backend::rank_rows(rows, x, factors, ctas_before);
    for (const RankFactorOf& factor : factors) {
      if (ctas > 0 || factor.layer == nullptr) continue;
      const AdaptedLayer& layer = *factor.layer;
      Backend::scaled_mm(columns(rows, factor.column, layer.rank()), x, transposed(*layer.a), layer.scaling);
    }
    return ctas;
  }

  LowRankTerm term_of_first(const OptionalTensor& rows) const {
    return {rows, layers_.first->b, layers_.up ? layers_.up->b : std::nullopt, up_column()};
  }

  // out = x weight^T + bias + rows b^T
  static void product_into(const Tensor& out, const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                           const OptionalTensor& rows, const OptionalTensor& b, int64_t first_column) {
    if (!b) return Backend::linear_into(out, x, weight, bias);
    const Tensor of_rank = Backend::rows(columns(*rows, first_column, b->size(1)));
    if (Backend::kAddsRankLast) {
      Backend::linear_into(out, x, weight, bias);
      Backend::add_mm(out, of_rank, transposed(*b));
    } else {
      Backend::linear_into(out, of_rank, *b, bias);
      Backend::add_mm(out, x, transposed(weight));
    }
  }

  void fill(const FirstLayer& first, const LowRankTerm& term, const Tensor& x, const Tensor& gate,
            const OptionalTensor& up) const {
    product_into(gate, x, first.weight, first.bias, term.rows, term.weight, 0);
    if (up) product_into(*up, x, *first.up_weight, first.up_bias, term.rows, term.up_weight, term.up_column);
  }

  // A layer whose values before the activation are not needed. Returns the number of CTAs of its kernel, or 0 if it is
  // torch's.
  int64_t run_layer(const Tensor& x, const FirstLayer& first, int64_t activation, const LowRankTerm& term,
                    int64_t ctas_before, const Tensor& out) const {
    if (auto kernel = Backend::layer(x, first, activation, term, ctas_before); kernel) {
      kernel.launch(out);
      return kernel.ctas();
    }
    const OptionalTensor up =
        first.up_weight ? OptionalTensor(new_dense(like_, {out.size(0), out.size(1)})) : std::nullopt;
    fill(first, term, x, out, up);
    if (up || activation != kLinear) Backend::apply(out, up, out, activation);
    return 0;
  }

  int64_t run_first(const FirstLayer& first, const OptionalTensor& rows, int64_t ctas_before, bool keep,
                    const Tensor& out, OptionalTensor* gate, OptionalTensor* up) const {
    const LowRankTerm term = term_of_first(rows);
    if (!keep) return run_layer(*x_, first, activation_, term, ctas_before, out);
    *gate = new_dense(like_, with_features(layers_.hidden()));
    if (layers_.up) *up = new_dense(like_, with_features(layers_.hidden()));
    if (auto kernel = Backend::kept_values(*x_, first, activation_, term); kernel) {
      kernel.launch(flat(**gate), flat(*up), out);
      return kernel.ctas();
    }
    fill(first, term, *x_, flat(**gate), flat(*up));
    Backend::apply(flat(**gate), flat(*up), out, activation_);
    return 0;
  }

  void make_again(const OptionalTensor& rows, bool with_values, OptionalTensor* gate, OptionalTensor* up,
                  OptionalTensor* values) const {
    if (with_values) {
      *values = new_hidden();
      run_first(first_layer(), rows, 0, true, **values, gate, up);
      return;
    }
    *gate = new_hidden();
    if (layers_.up) *up = new_hidden();
    fill(first_layer(), term_of_first(rows), *x_, **gate, *up);
  }

  void fill_values(const OptionalTensor& gate, const OptionalTensor& up, const OptionalTensor& first_rows,
                   const Tensor& values) const {
    if (layers_.is_linear(activation_)) {
      run_layer(*x_, first_layer(), activation_, term_of_first(first_rows), 0, values);
    } else if (gate) {
      Backend::apply(flat(*gate), flat(up), values, activation_);
    }
  }

  // The gradients of gate and up from that of the result, and the recomputed hidden values if they are needed.
  void differentiate_second(const Tensor& grad, const OptionalTensor& dsecond_rows, const OptionalTensor& gate,
                            const OptionalTensor& up, const OptionalTensor& first_rows, OptionalTensor* dgate,
                            OptionalTensor* dup, const OptionalTensor& values) const {
    const AdaptedLayer& second = *layers_.second;
    *dgate = new_hidden();
    if (layers_.up) *dup = new_hidden();
    const bool linear = layers_.is_linear(activation_);
    const Tensor weight = second.values();
    if (!linear) {
      auto kernel = Backend::hidden_gradients(
          grad, weight, flat(*gate), flat(up), activation_,
          LowRankTerm{dsecond_rows, second.a, std::nullopt, 0, masks_[2], second.scale_of_kept()});
      if (kernel) return kernel.launch(**dgate, *dup, values);
    }
    add_products(**dgate, {{dsecond_rows, second.a, 0, 2}}, {{grad, weight}});
    if (linear) {
      if (values) fill_values(gate, up, first_rows, *values);
      return;
    }
    Backend::differentiate(**dgate, flat(*gate), flat(up), **dgate, *dup, values, activation_);
  }

  struct RankProduct {
    const OptionalTensor &rows, &a;
    int64_t first_column;
    int place;
  };
  struct PlainProduct {
    const Tensor &grad, &weight;
  };

  // out = the sum of the products, low-rank ones first, so that the intermediate rounding is of small values.
  void add_products(const Tensor& out, std::initializer_list<RankProduct> of_rank,
                    std::initializer_list<PlainProduct> plain) const {
    const bool masked = sum_masked(out, of_rank);
    bool any = masked;
    const auto add = [&](const Tensor& a, const Tensor& b) {
      any ? Backend::add_mm(out, a, b) : Backend::mm(out, a, b);
      any = true;
    };
    for (const RankProduct& product : of_rank) {
      if (!product.a || (masked && drops(product))) continue;
      const Tensor rows = Backend::rows(columns(*product.rows, product.first_column, product.a->size(0)));
      if (!drops(product)) {
        add(rows, *product.a);
        continue;
      }
      const Tensor room = any ? new_dense(like_, {out.size(0), out.size(1)}) : out;
      Backend::mm(room, rows, *product.a);
      mask(product.place, out, room, any);
      any = true;
    }
    for (const PlainProduct& product : plain) add(product.grad, product.weight);
  }

  // out = the sum of the terms after a dropout, in one launch; or false.
  bool sum_masked(const Tensor& out, std::initializer_list<RankProduct> products) const {
    if constexpr (Backend::kDrops) {
      std::vector<LowRankTerm> terms;
      for (const RankProduct& product : products) {
        if (!product.a || !drops(product)) continue;
        const Tensor rows = columns(*product.rows, product.first_column, product.a->size(0));
        const float scale = layers_.at(product.place)->scale_of_kept();
        terms.push_back({rows, product.a, std::nullopt, 0, masks_[product.place], scale});
      }
      return !terms.empty() && Backend::masked_sum(out, terms);
    }
    return false;
  }
  bool drops(const RankProduct& product) const { return layers_.at(product.place)->dropout > 0; }

  template <typename Needed>
  void differentiate_first(const Tensor& dgate, const OptionalTensor& dup, const OptionalTensor& first_rows,
                           const Needed& needed) {
    const AdaptedLayer& first = *layers_.first;
    const int64_t rank = first.rank(), rank_of_up = up_rank();
    const auto& up = layers_.up;
    OptionalTensor drows;
    if (rank + rank_of_up > 0 && (needed(kOfX) || needed(kOfA) || needed(kOfA, 1))) {
      drows = new_first_rows();
      if (rank > 0) Backend::scaled_mm(columns(*drows, 0, rank), dgate, *first.b, first.scaling);
      if (rank_of_up > 0) Backend::scaled_mm(columns(*drows, up_column(), rank_of_up), *dup, *up->b, up->scaling);
    }
    if (needed(kOfX)) differentiate_x(dgate, dup, drows);
    if (needed(kOfB)) put(kOfB, of_weight(dgate, columns(*first_rows, 0, rank)));
    if (needed(kOfB, 1)) put(kOfB + 1, of_weight(*dup, columns(*first_rows, up_column(), rank_of_up)));
    const bool drops = first.dropout > 0 || (up && up->dropout > 0);
    if (needed(kOfA) && needed(kOfA, 1) && rank == up_column() && !drops) {
      const int64_t width = x_->size(1);
      const Tensor both = of_weight(columns(*drows, 0, rank + rank_of_up), *x_);
      put(kOfA, matrix_view(both, {rank, width}, {width, 1}));
      put(kOfA + 1, matrix_view(both, {rank_of_up, width}, {width, 1}, rank * width));
    } else {
      if (needed(kOfA)) put(kOfA, of_a(0, columns(*drows, 0, rank), *x_, false));
      if (needed(kOfA, 1)) put(kOfA + 1, of_a(1, columns(*drows, up_column(), rank_of_up), *x_, false));
    }
    if (needed(kOfWeights)) put(kOfWeights, of_weight(dgate, *x_));
    if (needed(kOfWeights, 1)) put(kOfWeights + 1, of_weight(*dup, *x_));
    if (needed(kOfBiases)) put(kOfBiases, Backend::column_sums(dgate, std::nullopt));
    if (needed(kOfBiases, 1)) put(kOfBiases + 1, Backend::column_sums(*dup, std::nullopt));
  }

  void differentiate_x(const Tensor& dgate, const OptionalTensor& dup, const OptionalTensor& drows) {
    const AdaptedLayer& first = *layers_.first;
    const Tensor dx = new_dense(like_, with_features(layers_.first->weight.size(1)));
    put(kOfX, dx);
    const auto& up = layers_.up;
    const OptionalTensor up_a = up ? up->a : std::nullopt;
    const Tensor weight = first.values();
    if (!up) return add_products(flat(dx), {{drows, first.a, 0, 0}}, {{dgate, weight}});
    const Tensor up_weight = up->values();
    if (first.dropout == 0 && up->dropout == 0) {
      auto kernel = Backend::input_gradient(Products{{dgate, weight}, {*dup, up_weight}},
                                            LowRankTerm{drows, first.a, up_a, up_column()});
      if (kernel) return kernel.launch(flat(dx));
    }
    add_products(flat(dx), {{drows, first.a, 0, 0}, {drows, up_a, up_column(), 1}},
                 {{dgate, weight}, {*dup, up_weight}});
  }

  // grad^T x
  Tensor of_weight(const Tensor& grad, const Tensor& x) const {
    const Tensor result = new_dense(like_, {grad.size(1), x.size(1)});
    Backend::mm(result, transposed(grad), x);
    return result;
  }

  void put(int operand, const Tensor& gradient) { found_[operand] = gradient; }

  std::vector<Tensor> results(int64_t needs) const {
    std::vector<Tensor> wanted;
    for (int operand = 0; operand < kAdaptedOperands; ++operand) {
      if (needs >> operand & 1) wanted.push_back(found_[operand].value());
    }
    return wanted;
  }

  static int64_t count_rows(const Tensor& like) {
    int64_t rows = 1;
    for (int64_t dim = 0; dim + 1 < like.dim(); ++dim) rows *= like.size(dim);
    return rows;
  }

  const Tensor like_;
  const OptionalTensor x_;  // as a matrix
  const int64_t rows_;
  const AdaptedLayers& layers_;
  const int64_t activation_;
  Masks masks_;  // drawn by a forward, or passed to a backward
  OptionalTensor found_[kAdaptedOperands];
};

}  // namespace fused_mlp
