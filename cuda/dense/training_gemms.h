// The GEMMs of training with their epilogues, with the interface that the layers' forward and backward use; torch's
// GEMMs replace those that an architecture does not have.
#pragma once

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "../../torch-ext/operands/operands.h"
#include "../../torch-ext/operands/tensor_rows.h"
#include "../../torch-ext/ops/adapted.h"
#include "../../torch-ext/ops/backward.h"
#include "../../torch-ext/ops/torch_gemm.h"
#include "../../torch-ext/torch_binding.h"
#include "../device.h"
#include "../gemm/architecture.h"
#include "../gemm/choice/record.h"
#include "../pointwise/column_sums.h"
#include "../pointwise/dropout.h"
#include "../pointwise/pointwise.h"
#include "layer.h"
#include "torch/products.h"

namespace fused_mlp {

// A tensor with adjacent elements in its rows, as a matrix.
inline Matrix matrix(const Tensor& rows) { return {const_cast<void*>(rows.const_data_ptr()), rows.stride(0)}; }

inline KeptBits bits_of(const Tensor& mask) {
  return {static_cast<uint32_t*>(const_cast<void*>(mask.const_data_ptr())), mask.size(1)};
}

// The left side of a product.
struct Left {
  Matrix operand;
  int64_t rows;
  DType dtype;
  int32_t device;

  Left(const Tensor& a) : operand(matrix(a)), rows(a.size(0)), dtype(dtype_of(a, "x")), device(a.get_device_index()) {}
  // An operand that does not exist yet, with as many rows as another.
  Left(const Left& other, int64_t cols) : Left(other) { operand = {nullptr, cols}; }
};

// A kernel for a product of training, or none. Its outputs exist only when it is launched.
class TrainingGemm {
 public:
  explicit operator bool() const { return refusal_ == Refusal::kNone; }

  int64_t ctas() const { return *this ? ctas_of(problem_, plan_.kernel) : 0; }

  void record(PlanRecord* plan) const {
    plan->layer();
    if (*this) {
      record_kernel(plan_.architecture->name, plan_.kernel, guesses(plan_, gpu(device_)), plan);
    } else {
      plan->set("implementation", "torch").set("refusal", code(refusal_));
      if (problem_.kind != Product::kPair) plan->set("pointwise", "cuda");
    }
  }

 protected:
  TrainingGemm() = default;

  // The product of a and a matrix weight, which is [k, n], or for a kept product [n, k].
  TrainingGemm(Product kind, const Left& a, const Tensor& weight, int64_t activation) : device_(a.device) {
    const bool lies = reads_weights_as_they_lie(kind);
    described_ = describe_weight(weight, &problem_.weight);
    problem_.kind = kind;
    problem_.a = a.operand;
    problem_.m = a.rows;
    problem_.n = weight.size(lies ? 1 : 0);
    problem_.k = weight.size(lies ? 0 : 1);
    problem_.out = {nullptr, problem_.n};
    problem_.dtype = a.dtype;
    problem_.epilogue.activation = activation;
  }

  // `launcher` only matters for a pair.
  void choose(Launcher launcher = Launcher::kGraph) {
    architecture_ = architecture_of(gpu(device_));
    if (architecture_ == nullptr) return;
    refusal_ = described_ ? choose_gemm(*architecture_, problem_, gpu(device_), &plan_, launcher)
                          : Refusal::kColumnMajorWeight;
  }

  // Adds the low-rank term. Weights whose rows are not aligned to 16 bytes are copied.
  void add(const LowRankTerm& term) {
    if (!term) return;
    LowRank& low_rank = problem_.low_rank;
    low_rank.rows = matrix(*term.rows);
    low_rank.up_column = term.up_column;
    if (term.mask) {
      const KeptBits kept = bits_of(*term.mask);
      low_rank.kept = kept.words;
      low_rank.words_of_row = kept.words_of_row;
      low_rank.scale = term.scale;
    }
    const bool lies = reads_weights_as_they_lie(problem_.kind);
    const auto describe = [&](const OptionalTensor& weight, Tensor* copy, Matrix* place, int64_t* k) {
      if (!weight) return;
      *k = weight->size(lies ? 0 : 1);
      *copy = in_vectors(*weight);
      *place = matrix(*copy);
    };
    describe(term.weight, &weight_, &low_rank.weight, &low_rank.k);
    describe(term.up_weight, &up_weight_, &low_rank.up_weight, &low_rank.up_k);
  }

  void launch_on_stream_of(const Tensor& tensor) const {
    check(plan_.architecture->launch(problem_, plan_, gpu(device_), current_stream(tensor)));
  }

  // The matrix itself, or a copy whose rows are aligned to 16 bytes.
  static Tensor in_vectors(const Tensor& weight) {
    constexpr int64_t kVector = 8;
    const int64_t rows = weight.size(0), cols = weight.size(1);
    const bool vectors =
        weight.stride(0) % kVector == 0 && reinterpret_cast<uintptr_t>(weight.const_data_ptr()) % 16 == 0;
    if ((weight.stride(1) == 1 || cols == 1) && vectors) return weight;
    const Tensor copy = new_dense(weight, {rows, ceil_div(cols, kVector) * kVector});
    Tensor view = matrix_view(copy, {rows, cols}, {copy.stride(0), 1});
    torch::stable::copy_(view, weight);
    return view;
  }

  GemmProblem problem_{};
  Tensor weight_, up_weight_;  // of the low-rank term
  bool described_ = false;     // true if the weights' rows and the biases have adjacent elements

 private:
  const Architecture* architecture_ = nullptr;
  GemmPlan plan_{};
  Refusal refusal_ = Refusal::kGpu;
  int32_t device_ = 0;
};

// A first layer, with the values that its backward needs.
struct KeptGemm : TrainingGemm {
  KeptGemm() = default;
  KeptGemm(const Left& x, const FirstLayer& first, int64_t activation, const LowRankTerm& term = {})
      : TrainingGemm(first.up_weight ? Product::kGatedKept : Product::kPlainKept, x, first.weight, activation) {
    EpilogueArgs& epilogue = problem_.epilogue;
    described_ = described_ && describe_bias(first.bias, &epilogue.bias) &&
                 describe_bias(first.up_bias, &epilogue.up_bias) &&
                 (!first.up_weight || describe_weight(*first.up_weight, &problem_.up_weight));
    add(term);
    choose();
  }

  void launch(const Tensor& gate, const OptionalTensor& up, const Tensor& values) {
    problem_.training.gate = matrix(gate);
    if (up) problem_.training.up = matrix(*up);
    problem_.out = matrix(values);
    launch_on_stream_of(values);
  }
};

struct HiddenGradients : TrainingGemm {
  HiddenGradients() = default;
  // `up` is kNoMatrix if there is none.
  HiddenGradients(bool gated, const Left& grad, const Tensor& weight, const Matrix& gate, const Matrix& up,
                  int64_t activation, const LowRankTerm& term = {})
      : TrainingGemm(gated ? Product::kGatedGradient : Product::kPlainGradient, grad, weight, activation) {
    problem_.training.gate = gate;
    problem_.training.up = up;
    add(term);
    choose();
  }

  void launch(const Tensor& dgate, const OptionalTensor& dup, const OptionalTensor& values) {
    problem_.training.gate_gradient = matrix(dgate);
    if (dup) problem_.training.up_gradient = matrix(*dup);
    if (values) problem_.out = matrix(*values);
    launch_on_stream_of(dgate);
  }
};

struct InputGradient : TrainingGemm {
  InputGradient() = default;
  // The sum of up to three products; if their k differ, there is no kernel.
  explicit InputGradient(const std::vector<std::pair<Left, Tensor>>& of, const LowRankTerm& term = {})
      : TrainingGemm(Product::kPair, of[0].first, of[0].second, kNoActivation) {
    TrainingMatrices& t = problem_.training;
    const std::array<std::pair<Matrix*, Matrix*>, 2> places{
        {{&t.second_a, &t.second_weight}, {&t.third_a, &t.third_weight}}};
    for (size_t i = 1; i < of.size(); ++i) {
      const auto& [left, weight] = of[i];
      *places[i - 1].first = left.operand;
      described_ = described_ && weight.size(0) == problem_.k && describe_weight(weight, places[i - 1].second);
    }
    add(term);
    choose(is_captured(current_stream(of[0].second)) ? Launcher::kGraph : Launcher::kCpu);
  }

  void launch(const Tensor& dx) {
    problem_.out = matrix(dx);
    launch_on_stream_of(dx);
  }
};

// A layer of inference, with a low-rank term.
struct LayerGemm : TrainingGemm {
  LayerGemm() = default;
  LayerGemm(const Left& x, const FirstLayer& first, int64_t activation, const LowRankTerm& term, int64_t ctas_before)
      : TrainingGemm(Product::kPlain, x, first.weight, activation) {
    EpilogueArgs& epilogue = problem_.epilogue;
    described_ = described_ && describe_bias(first.bias, &epilogue.bias) &&
                 describe_bias(first.up_bias, &epilogue.up_bias) &&
                 (!first.up_weight || describe_weight(*first.up_weight, &problem_.up_weight));
    add(term);
    problem_.ctas_before = ctas_before;
    choose(is_captured(current_stream(first.weight)) ? Launcher::kGraph : Launcher::kCpu);
  }

  void launch(const Tensor& out) {
    problem_.out = matrix(out);
    launch_on_stream_of(out);
  }
};

// The functions that backward.h and adapted.h require of a backend.
struct Cuda {
  struct Guard : DeviceGuard {
    explicit Guard(const Tensor& x) : DeviceGuard(x.get_device_index()) {}
  };

  static void linear_into(const Tensor& out, const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
    multiply(out, x, transposed(weight), bias);
  }

  static constexpr bool kHasSums = true;
  static constexpr bool kAddsRankLast = false;

  static void mm(const Tensor& out, const Tensor& a, const Tensor& b) { multiply(out, a, b); }

  static void add(const Tensor& sum, const Tensor& term) {
    check(launch_add(sum.mutable_data_ptr(), term.mutable_data_ptr(), sum.numel(), current_stream(sum)));
  }

  static void add_mm(const Tensor& out, const Tensor& a, const Tensor& b) { multiply_and_add(out, a, b); }

  // For a small weight, a single product has too few tiles for the chip. For a large weight batching gains nothing, and
  // padded operands are one product already.
  static bool batches(const Tensor& like, int64_t out, int64_t in) {
    constexpr int64_t kSmall = 1 << 24;
    const bool is_padded = out % kVectorOfHalves != 0 || in % kVectorOfHalves != 0;
    return dtype_of(like, "grad") != DType::kFloat32 && out * in <= kSmall && !is_padded;
  }

  // The four matrices are separate tensors. The batch stride is the distance between the two of a pair.
  static void mm_both(Tensor& out, Tensor& up_out, const Tensor& a, const Tensor& up_a, const Tensor& x) {
    const auto address = [](const Tensor& matrix) { return static_cast<const uint16_t*>(matrix.const_data_ptr()); };
    const auto batch = [&](const Tensor& first, const Tensor& second) {
      return view_of(first, std::array<int64_t, 3>{2, first.size(0), first.size(1)},
                     std::array{address(second) - address(first), first.stride(0), first.stride(1)});
    };
    const bool ascending = address(a) < address(up_a);
    if (ascending != (address(out) < address(up_out))) std::swap(out, up_out);
    const Tensor outs = ascending ? batch(out, up_out) : batch(up_out, out);
    const Tensor sides = ascending ? batch(transposed(a), transposed(up_a)) : batch(transposed(up_a), transposed(a));
    const Tensor twice =
        view_of(x, std::array<int64_t, 3>{2, x.size(0), x.size(1)}, std::array{int64_t{0}, x.stride(0), x.stride(1)});
    TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_bmm_out(outs.get(), sides.get(), twice.get()));
  }

  static Tensor column_sums(const Tensor& x, std::optional<torch::headeronly::ScalarType> dtype) {
    const int64_t rows = x.size(0), cols = x.size(1);
    const int64_t parts = parts_of_column_sums(rows, cols, gpu(x.get_device_index()).multiprocessors);
    const Tensor out = new_dense(x, {cols}, dtype);
    std::optional<Scratch> partial;
    if (parts > 1) partial.emplace(parts * cols * static_cast<int64_t>(sizeof(float)));
    check(launch_column_sums(matrix(x), rows, cols, dtype_of(x, "grad"), out.mutable_data_ptr(), dtype_of(out, "bias"),
                             partial ? static_cast<float*>(partial->data()) : nullptr, parts, current_stream(x)));
    return out;
  }

  static Tensor rows(const Tensor& x) {
    const TensorRows found(x);
    return matrix_view(found.tensor, {found.rows, found.cols}, {found.row_stride, 1});
  }

  static void apply(const Tensor& gate, const OptionalTensor& up, const Tensor& out, int64_t activation) {
    check(launch_act_and_mul(matrix(gate), up ? matrix(*up) : kNoMatrix, matrix(out), gate.size(0), gate.size(1),
                             dtype_of(gate, "x"), activation, current_stream(gate)));
  }

  static void differentiate(const Tensor& grad, const Tensor& gate, const OptionalTensor& up, const Tensor& dgate,
                            const OptionalTensor& dup, const OptionalTensor& values, int64_t activation) {
    const auto if_any = [](const OptionalTensor& rows) { return rows ? matrix(*rows) : kNoMatrix; };
    check(launch_act_and_mul_backward(matrix(grad), matrix(gate), if_any(up), matrix(dgate), if_any(dup),
                                      if_any(values), gate.size(0), gate.size(1), dtype_of(gate, "x"), activation,
                                      current_stream(gate)));
  }

  static void scaled_mm(const Tensor& out, const Tensor& a, const Tensor& b, double scale) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_addmm_out(out.get(), out.get(), a.get(), b.get(), 0.0, scale));
  }

  static int64_t rank_rows(const Tensor& out, const Tensor& x, const RankFactors& factors, int64_t ctas_before) {
    const Architecture* const architecture = architecture_of(gpu(x.get_device_index()));
    if (architecture == nullptr || architecture->launch_rank_rows == nullptr) return 0;
    RankRows product{matrix(x), matrix(out), x.size(0), x.size(1), {}, dtype_of(x, "x")};
    for (size_t i = 0; i < factors.size(); ++i) {
      if (factors[i].layer == nullptr) continue;
      const AdaptedLayer& layer = *factors[i].layer;
      if (layer.a->stride(1) != 1 && layer.a->size(1) != 1) return 0;
      product.factors[i] = {matrix(*layer.a), layer.rank(), factors[i].column, static_cast<float>(layer.scaling)};
    }
    const int64_t ctas = architecture->rank_rows_ctas(product);
    if (ctas > 0) check(architecture->launch_rank_rows(product, ctas_before > 0, current_stream(x)));
    return ctas;
  }

  static constexpr bool kDrops = true;

  static Dropped drop(const Tensor& x, double p, bool wide) {
    using torch::headeronly::ScalarType;
    const int64_t cols = x.size(-1), rows = x.numel() / cols;
    const bool cast = wide && x.scalar_type() != ScalarType::Float;
    // The mask does not depend on the values, but that of another dtype differs.
    const Tensor given = cast ? new_dense(x, {x.sizes().begin(), x.sizes().end()}, ScalarType::Float) : x;
    int32_t train = 1;
    AtenTensorHandle values = nullptr, kept = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_native_dropout(given.get(), p, &train, &values, &kept));
    const Tensor dropped(values), bytes(kept);
    const Tensor mask = new_dense(x, {rows, words_of_mask(cols)}, ScalarType::Int);
    check(launch_pack_mask(static_cast<const uint8_t*>(bytes.const_data_ptr()), rows, cols, bits_of(mask),
                           current_stream(x)));
    if (!cast) return {matrix_view(dropped, {rows, cols}, {cols, 1}), mask};
    const Tensor masked = new_dense(x, {rows, cols});
    Cuda::mask(masked, matrix_view(x, {rows, cols}, {cols, 1}), mask, 1.0f / static_cast<float>(1.0 - p), false);
    return {masked, mask};
  }

  static void mask(const Tensor& out, const Tensor& x, const Tensor& mask, float scale, bool adds) {
    check(launch_mask(matrix(x), bits_of(mask), scale, adds, matrix(out), x.size(0), x.size(1), dtype_of(x, "x"),
                      current_stream(x)));
  }

  static Tensor drawn_rows(const Tensor& rows, const Tensor& x, const RankFactorOf& factor, const Drawing& drawing,
                           int place) {
    const AdaptedLayer& layer = *factor.layer;
    const int64_t cols = x.size(-1), count = x.numel() / cols;
    const Tensor flat = matrix_view(x, {count, cols}, {cols, 1});
    const Tensor mask = new_dense(x, {count, words_of_mask(cols)}, torch::headeronly::ScalarType::Int);
    const DType dtype = dtype_of(x, "x");
    const int vector = drawing.wide || dtype == DType::kFloat32 ? 4 : 8;
    const auto scale = static_cast<float>(layer.scaling) * layer.scale_of_kept();
    const Tensor of_factor = matrix_view(rows, {count, layer.rank()}, {rows.stride(0), 1}, factor.column);
    const Draw draw{drawing.seed(), drawing.offset(place), drawing.threads(), vector, layer.dropout};
    DroppedRows product{.x = matrix(flat),
                        .a = matrix(*layer.a),
                        .out = matrix(of_factor),
                        .rows = count,
                        .cols = cols,
                        .ranks = layer.rank(),
                        .scale = scale,
                        .dtype = dtype,
                        .draw = draw,
                        .kept = bits_of(mask)};
    const bool fits = product.fits() && layer.a->stride(1) == 1;
    if (!fits) product.out = kNoMatrix;
    const Architecture* const architecture = architecture_of(gpu(x.get_device_index()));
    STD_TORCH_CHECK(architecture != nullptr && architecture->dropped != nullptr && cols % kWordColumns == 0,
                    "no kernel supports these dropouts");
    check(architecture->dropped->rows(product, current_stream(x)));
    if (!fits) {
      const Tensor masked = new_dense(x, {count, cols});
      Cuda::mask(masked, flat, mask, layer.scale_of_kept(), false);
      scaled_mm(of_factor, masked, transposed(*layer.a), layer.scaling);
    }
    return mask;
  }

  static bool masked_sum(const Tensor& out, const std::vector<LowRankTerm>& terms) {
    const Gpu& here = gpu(out.get_device_index());
    const Architecture* const architecture = architecture_of(here);
    if (architecture == nullptr || architecture->dropped == nullptr || terms.size() > 2) return false;
    MaskedSum sum{{}, static_cast<int>(terms.size()), matrix(out), out.size(0), out.size(1), dtype_of(out, "grad")};
    for (size_t i = 0; i < terms.size(); ++i) {
      const LowRankTerm& term = terms[i];
      if (term.weight->stride(1) != 1) return false;
      sum.terms[i] = {matrix(*term.rows), matrix(*term.weight), term.weight->size(0), bits_of(*term.mask), term.scale};
    }
    if (!sum.fits()) return false;
    check(architecture->dropped->sum(sum, here.multiprocessors, current_stream(out)));
    return true;
  }

  static OptionalTensor masked_outer(const Tensor& grads, const Tensor& x, const Tensor& mask, float scale) {
    const Gpu& here = gpu(x.get_device_index());
    const Architecture* const architecture = architecture_of(here);
    if (architecture == nullptr || architecture->dropped == nullptr) return std::nullopt;
    const Tensor out = new_dense(x, {grads.size(1), x.size(1)});
    const OuterFactor product{.x = matrix(x),
                              .grads = matrix(grads),
                              .out = matrix(out),
                              .rows = x.size(0),
                              .cols = x.size(1),
                              .ranks = grads.size(1),
                              .scale = scale,
                              .dtype = dtype_of(x, "x"),
                              .kept = bits_of(mask)};
    if (!product.fits_masked() || x.stride(1) != 1) return std::nullopt;
    check(architecture->dropped->outer(product, here.multiprocessors, current_stream(x)));
    return out;
  }

  static LayerGemm layer(const Tensor& x, const FirstLayer& first, int64_t activation, const LowRankTerm& term,
                         int64_t ctas_before) {
    return {x, first, activation, term, ctas_before};
  }

  static KeptGemm kept_values(const Tensor& x, const FirstLayer& first, int64_t activation,
                              const LowRankTerm& term = {}) {
    return {x, first, activation, term};
  }

  static HiddenGradients hidden_gradients(const Tensor& grad, const Tensor& weight, const Tensor& gate,
                                          const OptionalTensor& up, int64_t activation, const LowRankTerm& term = {}) {
    return {up.has_value(), grad, weight, matrix(gate), up ? matrix(*up) : kNoMatrix, activation, term};
  }

  static InputGradient input_gradient(const Products& of, const LowRankTerm& term = {}) {
    return InputGradient({of.begin(), of.end()}, term);
  }
};

}  // namespace fused_mlp
