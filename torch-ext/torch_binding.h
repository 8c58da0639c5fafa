#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

// The ops of the package. Each backend (cuda/, cpu/) implements all of them.
//
// Shapes: x [..., in], weights [out, in] as in torch.nn.Linear, biases [out]; `activation` is a code of activation.h.
// Operands share one dtype and one device. Invalid operands raise an error (operands.h).
namespace fused_mlp {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// act(gate) * up, elementwise; gate and up have the same shape.
Tensor act_and_mul(const Tensor& gate, const Tensor& up, int64_t activation);

// Gradients of act_and_mul for gate and up, given the gradient of its result.
std::tuple<Tensor, Tensor> act_and_mul_backward(const Tensor& grad, const Tensor& gate, const Tensor& up,
                                                int64_t activation);

// a [m, k] b [k, n] by torch's GEMM, on a GPU by cuda/dense/torch/products.h
Tensor mm(const Tensor& a, const Tensor& b);

// act(x weight^T + bias)
Tensor linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, int64_t activation);

// act(x gate_weight^T + gate_bias) * (x up_weight^T + up_bias)
Tensor gated_linear(const Tensor& x, const Tensor& gate_weight, const Tensor& up_weight,
                    const OptionalTensor& gate_bias, const OptionalTensor& up_bias, int64_t activation);

// How a call would be computed, as the text of a PlanRecord (plan.h): linear, or gated_linear if there is an up_weight;
// with a second_weight, that of the second layer, mlp or gated_mlp.
std::string plan(const Tensor& x, const Tensor& weight, const OptionalTensor& up_weight,
                 const OptionalTensor& second_weight, const OptionalTensor& bias, const OptionalTensor& up_bias,
                 const OptionalTensor& second_bias, int64_t activation);

// gated_linear(...) down_weight^T + down_bias
Tensor gated_mlp(const Tensor& x, const Tensor& gate_weight, const Tensor& up_weight, const Tensor& down_weight,
                 const OptionalTensor& gate_bias, const OptionalTensor& up_bias, const OptionalTensor& down_bias,
                 int64_t activation);

// linear(x, fc1_weight, fc1_bias, activation) fc2_weight^T + fc2_bias
Tensor mlp(const Tensor& x, const Tensor& fc1_weight, const Tensor& fc2_weight, const OptionalTensor& fc1_bias,
           const OptionalTensor& fc2_bias, int64_t activation);

// The block that an MLP is part of, with a residual in the shape of the result:
//
//   residual + factor * last(mlp(first(x), ...))
//   last(residual + factor * mlp(first(x), ...))    if `norms_sum`
//
// first_norm and last_norm are codes of norms over the last dimension: 0 nothing, 1 LayerNorm, 2 RMSNorm, 3 RMSNorm
// whose weight is stored minus 1, 5 LayerNorm likewise, and 4, only for the MLP's result, a product with the weight.
// Their weights and biases, which may be float32, are [features], or broadcast to the rows such that rows which share
// one are consecutive: [batch, 1, features] for [batch, tokens, features]. Without fc1_weight it is one layer, by
// fc2_weight. The operations around the MLP are rounded once. The rows of the result are adjacent, even if those of the
// residual are not, so that a kernel that reads them next does not have to copy them.
Tensor residual_mlp(const Tensor& x, const OptionalTensor& fc1_weight, const Tensor& fc2_weight,
                    const OptionalTensor& fc1_bias, const OptionalTensor& fc2_bias, int64_t activation,
                    const Tensor& residual, double factor, const OptionalTensor& first_weight,
                    const OptionalTensor& first_bias, double first_eps, int64_t first_norm,
                    const OptionalTensor& last_weight, const OptionalTensor& last_bias, double last_eps,
                    int64_t last_norm, bool norms_sum);

// The same for a gated MLP.
Tensor residual_gated_mlp(const Tensor& x, const Tensor& gate_weight, const Tensor& up_weight,
                          const Tensor& down_weight, const OptionalTensor& gate_bias, const OptionalTensor& up_bias,
                          const OptionalTensor& down_bias, int64_t activation, const Tensor& residual, double factor,
                          const OptionalTensor& first_weight, const OptionalTensor& first_bias, double first_eps,
                          int64_t first_norm, const OptionalTensor& last_weight, const OptionalTensor& last_bias,
                          double last_eps, int64_t last_norm, bool norms_sum);

// A single norm over the last dimension, with a code of residual_mlp (except 0 and 4), and with a weight and a bias
// [features], which may be float32. If `rounded`, the normalised value is rounded before it is multiplied by the
// weight. Also returns what the backward needs of each row, in float32: [2, rows] for a LayerNorm, the factor and the
// mean, and [1, rows] for an RMSNorm.
std::tuple<Tensor, Tensor> norm_forward(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                                        double eps, int64_t norm, bool rounded);

// The same for residual + dropout(x), which is rounded first. Returns the norm, that sum, what a backward needs of each
// row, and the mask of the dropout if it is not 0. The dropout draws torch's random numbers. On a CPU it must be 0.
std::vector<Tensor> sum_norm_forward(const Tensor& x, const Tensor& residual, const OptionalTensor& weight,
                                     const OptionalTensor& bias, double eps, int64_t norm, double dropout);

// The gradients required by the bits of `needs`: of x, to which that of a residual is added in the same kernel; of the
// weight; of the bias. If x was a sum with the output of a dropout, whose mask is `kept`, on a GPU also those of the
// dropout's input, and of a bias that had been added to that input. Sums over rows are added in an order that depends
// only on the shape and the device.
std::vector<Tensor> norm_backward(const Tensor& grad, const Tensor& x, const OptionalTensor& weight,
                                  const Tensor& statistics, const OptionalTensor& residual_grad,
                                  const OptionalTensor& kept, double dropout, int64_t norm, int64_t needs);

// One to three linear layers of one input: x [..., in], weights [out, in], biases [out] or none. The results equal
// those of torch's linear bit for bit.
std::vector<Tensor> projections_forward(const Tensor& x, const Tensor& first_weight,
                                        const OptionalTensor& second_weight, const OptionalTensor& third_weight,
                                        const OptionalTensor& first_bias, const OptionalTensor& second_bias,
                                        const OptionalTensor& third_bias);

// The gradients required by the bits of `needs`, for the operands of projections_forward in their order, given those of
// its results; for x the sum over the layers whose results have one. Operands that they do not need may be missing.
std::vector<Tensor> projections_backward(const OptionalTensor& first_grad, const OptionalTensor& second_grad,
                                         const OptionalTensor& third_grad, const OptionalTensor& x,
                                         const OptionalTensor& first_weight, const OptionalTensor& second_weight,
                                         const OptionalTensor& third_weight, int64_t needs);

// Rotary embeddings of queries and keys [batch, heads, tokens, features], whose numbers of heads may differ, with
// cosines and sines [batch or 1, tokens, features] in the same dtype: x cos + (-x2, x1) sin, where x1 and x2 are the
// halves of the features of x. If `inverse`, the gradients of x, given those of the results.
std::tuple<Tensor, Tensor> rotary(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin, bool inverse);

// The experts of a mixture: for tokens x [T, in], the sum of the MLPs of the experts top_k_index [T, K], each times its
// weight in top_k_weights [T, K], of any floating dtype. Indices that name no expert are skipped.
//
// Weights are [E, 2 * hidden, in] or, if not gated, [E, hidden, in], and [E, out, hidden]; if transposed, the last two
// dimensions are swapped. Gates come before ups, or alternate with them if interleaved. With a limit, gates are clamped
// to at most the limit, and ups to [-limit, limit]; up_offset is then added to the ups.
//
// On a GPU, raises an error for operands that its kernel does not support (cuda/experts/experts.cpp).
Tensor experts_mlp(const Tensor& x, const Tensor& top_k_index, const Tensor& top_k_weights,
                   const Tensor& gate_up_weight, const Tensor& down_weight, const OptionalTensor& gate_up_bias,
                   const OptionalTensor& down_bias, int64_t activation, bool gated, bool interleaved, bool transposed,
                   std::optional<double> limit, double up_offset);

// The same, written into `out`, whose rows are adjacent, with rows of a residual added.
void experts_into(const Tensor& out, const OptionalTensor& residual, const Tensor& x, const Tensor& top_k_index,
                  const Tensor& top_k_weights, const Tensor& gate_up_weight, const Tensor& down_weight,
                  const OptionalTensor& gate_up_bias, const OptionalTensor& down_bias, int64_t activation, bool gated,
                  bool interleaved, bool transposed, std::optional<double> limit, double up_offset);

// On Hopper GPUs, the same with adapters: the factors a [E, rank, in] and b [E, 2 * hidden, rank] of the first layer,
// both or none, and those of the second, in the dtype of x or in float32, and the scalings of both. No weights are
// transposed.
Tensor adapted_experts(const Tensor& x, const Tensor& top_k_index, const Tensor& top_k_weights,
                       const Tensor& gate_up_weight, const Tensor& down_weight, const OptionalTensor& gate_up_bias,
                       const OptionalTensor& down_bias, const std::vector<OptionalTensor>& factors,
                       const std::vector<double>& scalings, int64_t activation, bool gated, bool interleaved,
                       bool transposed, std::optional<double> limit, double up_offset);

// How it would be computed, in the form that `plan` returns for the other ops, for operands that its kernel supports;
// `trained`: under autograd.
std::string plan_experts(const Tensor& x, const Tensor& gate_up_weight, const Tensor& down_weight, int64_t top_k,
                         bool transposed, bool trained);

// On a GPU, experts_mlp with quantised weights, data and scales of each layer, for x in bfloat16. `layouts` has five
// numbers per layer: experts, out, in, and the rows and columns of a block. For FP8, data is e4m3 [E, out, in] and
// scales are float32, one per block of each expert. For MXFP4, data is bytes with two codes of e2m1, the first in the
// low half, and scales are bytes [E, out, in / 32], exponents of two. Inputs are multiples of 64; the columns of FP8
// blocks are a power of two from 64, or all. Biases may be float32. With `many_rows`, on Hopper, the kernels for many
// rows per expert run. For FP8 they round rows of x and hidden values to e4m3 in groups of 128 columns; this needs
// blocks of multiples of 128 x 128, without biases, limits or alternating gates and ups.
Tensor quantized_experts(const Tensor& x, const Tensor& top_k_index, const Tensor& top_k_weights, const Tensor& gate_up,
                         const Tensor& gate_up_scales, const Tensor& down, const Tensor& down_scales,
                         const std::vector<int64_t>& layouts, const OptionalTensor& gate_up_bias,
                         const OptionalTensor& down_bias, int64_t activation, bool gated, bool interleaved,
                         std::optional<double> limit, double up_offset, bool many_rows);

// Such weights as a tensor [E, out, in], with any inputs and blocks, in any `dtype`.
Tensor decoded_experts(const Tensor& data, const Tensor& scales, const std::vector<int64_t>& layout,
                       torch::headeronly::ScalarType dtype);

// The record of how quantized_experts would be computed, as `plan` gives it for the other ops.
std::string plan_quantized_experts(const Tensor& x, int64_t top_k, int64_t experts, bool fp8, bool many_rows);

// The router of a mixture, for tokens x [T, in] and a weight [experts, in]. Returns the logits [T, experts], the top_k
// largest softmax values [T, top_k], in float32 or, if `narrow`, in the dtype of x, and the indices of their experts in
// int64. Of equal values the first is chosen. If `normalized`, the weights of a token are divided by their sum.
//
// On a CPU, raises an error for 16-bit x.
std::tuple<Tensor, Tensor, Tensor> top_k_router(const Tensor& x, const Tensor& weight, int64_t top_k, bool normalized,
                                                bool narrow);

// Only on a GPU: the same with sigmoids of the logits in float32, for any dtype of x. The experts with the largest
// sigmoid plus `bias` [experts] are chosen, among the `top_groups` of `groups` whose two largest have the largest sum.
// The weights, in float32, are the sigmoids, divided by their sum plus 1e-20 if `normalized`, times `scaling`.
std::tuple<Tensor, Tensor, Tensor> sigmoid_router(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                                  int64_t top_k, int64_t groups, int64_t top_groups, bool normalized,
                                                  double scaling);

// On a GPU, experts_mlp under autograd, for experts with as many outputs as inputs. Returns the result, and what its
// backward needs: x sorted by expert, without elements unless `keeps_sorted`, and the values of gates and ups before
// limits and activation, in the layout of the weights. `factors` are none, or those of adapted_experts; then the rows
// of the first layer's adapter, if it has one, come last.
std::vector<Tensor> experts_training_forward(const Tensor& x, const Tensor& top_k_index, const Tensor& top_k_weights,
                                             const Tensor& gate_up_weight, const Tensor& down_weight,
                                             const OptionalTensor& gate_up_bias, const OptionalTensor& down_bias,
                                             const std::vector<OptionalTensor>& factors,
                                             const std::vector<double>& scalings, int64_t activation, bool gated,
                                             bool interleaved, bool transposed, std::optional<double> limit,
                                             double up_offset, bool keeps_sorted);

// The gradients required by the bits of `needs`: those of x, top_k_weights, gate_up_weight and down_weight, in this
// order, those of the four factors, in their layout, and those of the biases. `rank_rows` is the last result of the
// forward. `sorted` is read only for the gradients of gate_up_weight and of its first factor. One more bit requests the
// gradients of `gate_up`, which come last; with the bit above, `gate_up` holds these gradients, from which the others
// follow; and with the next one `sorted` is x itself, which suffices for the gradient of the first factor.
std::vector<Tensor> experts_training_backward(const Tensor& grad, const OptionalTensor& sorted, const Tensor& gate_up,
                                              const Tensor& top_k_index, const Tensor& top_k_weights,
                                              const Tensor& gate_up_weight, const Tensor& down_weight,
                                              const OptionalTensor& gate_up_bias, const OptionalTensor& down_bias,
                                              const std::vector<OptionalTensor>& factors,
                                              const std::vector<double>& scalings, const OptionalTensor& rank_rows,
                                              int64_t activation, bool gated, bool interleaved, bool transposed,
                                              std::optional<double> limit, double up_offset, int64_t needs);

// The same in less memory: the kept gates and ups are overwritten.
std::vector<Tensor> experts_training_backward_(const Tensor& grad, const OptionalTensor& sorted, const Tensor& gate_up,
                                               const Tensor& top_k_index, const Tensor& top_k_weights,
                                               const Tensor& gate_up_weight, const Tensor& down_weight,
                                               const OptionalTensor& gate_up_bias, const OptionalTensor& down_bias,
                                               const std::vector<OptionalTensor>& factors,
                                               const std::vector<double>& scalings, const OptionalTensor& rank_rows,
                                               int64_t activation, bool gated, bool interleaved, bool transposed,
                                               std::optional<double> limit, double up_offset, int64_t needs);

// The op for a call under autograd: linear, or gated_linear if there is an up_weight; with a second_weight, mlp or
// gated_mlp. Returns the result, and with `keep` the values before the activation and, for a gated layer, those that it
// is multiplied by, [..., hidden]; empty tensors replace what is not kept. With `up_first`, weight and bias hold gate
// and up, of which up comes first or second, and so does what is kept, [..., 2 * hidden].
std::tuple<Tensor, Tensor, Tensor> training_forward(const Tensor& x, const Tensor& weight,
                                                    const OptionalTensor& up_weight,
                                                    const OptionalTensor& second_weight, const OptionalTensor& bias,
                                                    const OptionalTensor& up_bias, const OptionalTensor& second_bias,
                                                    int64_t activation, bool keep, std::optional<bool> up_first);

// How its products would be computed, in the form of `plan`. On a GPU those with an epilogue: the first layer, if it is
// kept; with a second weight, the gradients of gate and up; and, for a gated layer, that of x. On a CPU the first
// layer, if it is kept, and the products of the backward.
std::string plan_training(const Tensor& x, const Tensor& weight, const OptionalTensor& up_weight,
                          const OptionalTensor& second_weight, const OptionalTensor& bias,
                          const OptionalTensor& up_bias, int64_t activation, bool keep);

// Only on a CPU: the number of hidden values, in the dtype of x, from which training by the op takes less time than by
// its parts, although autograd calls the op's backward in Python.
int64_t least_recorded(const Tensor& x);

// The gradients of its operands that `needs` requires (backward.h), given that of its result. `gate` and `up` are the
// values that it kept; other operands that none of these gradients needs may be missing. Without `gate` it is
// recomputed from all operands.
std::vector<Tensor> training_backward(const Tensor& grad, const OptionalTensor& x, const OptionalTensor& weight,
                                      const OptionalTensor& up_weight, const OptionalTensor& second_weight,
                                      const OptionalTensor& bias, const OptionalTensor& up_bias,
                                      const OptionalTensor& gate, const OptionalTensor& up, int64_t activation,
                                      int64_t needs, std::optional<bool> up_first);

// The same in less memory: what was kept is overwritten, and its memory freed.
std::vector<Tensor> training_backward_(const Tensor& grad, const OptionalTensor& x, const OptionalTensor& weight,
                                       const OptionalTensor& up_weight, const OptionalTensor& second_weight,
                                       const OptionalTensor& bias, const OptionalTensor& up_bias, const Tensor& gate,
                                       const OptionalTensor& up, int64_t activation, int64_t needs,
                                       std::optional<bool> up_first);

// Layers with low-rank adapters. The elements at one position in the lists belong to one layer: the first or gate, the
// up if `gated`, and the second or down of an MLP. A layer computes x weight^T + bias + scaling * (x a^T) b^T; the
// activation follows the first. Returns the result and what a backward needs, as `keep` says (adapted.h): gate and up
// before the activation, and the products scaling * x a^T of the first layer and of the second; if an element of
// `dropouts` is not 0, also the masks of the three layers. If `drawn` is empty, torch draws; otherwise the caller has
// reserved numbers of torch's generator (adapted.h).
std::vector<Tensor> adapted_forward(const Tensor& x, const std::vector<Tensor>& weights,
                                    const std::vector<OptionalTensor>& biases, const std::vector<OptionalTensor>& a,
                                    const std::vector<OptionalTensor>& b, const std::vector<double>& scalings,
                                    const std::vector<double>& dropouts, bool wide_dropout, bool up_drops_first,
                                    const std::vector<int64_t>& drawn, bool gated, int64_t activation, int64_t keep);

// The gradients that `needs` requires (adapted.h), given that of its result and what it kept. Without `gate` the values
// before the activation are recomputed from x; not all gradients need x.
std::vector<Tensor> adapted_backward(const Tensor& grad, const OptionalTensor& x, const std::vector<Tensor>& weights,
                                     const std::vector<OptionalTensor>& biases, const std::vector<OptionalTensor>& a,
                                     const std::vector<OptionalTensor>& b, const std::vector<double>& scalings,
                                     const std::vector<double>& dropouts, const std::vector<OptionalTensor>& masks,
                                     const OptionalTensor& gate, const OptionalTensor& up,
                                     const OptionalTensor& first_rows, const OptionalTensor& second_rows, bool gated,
                                     int64_t activation, int64_t needs);

// The same over quantised weights, in the lists of quantized_mlp, with the positions of their layers among those that
// exist; in `weights` these have tensors of their shapes. Each weight is decoded when it is needed, and then freed.
std::vector<Tensor> packed_adapted_forward(const std::vector<OptionalTensor>& packed,
                                           const std::vector<int64_t>& layouts, const std::vector<double>& offsets,
                                           const std::vector<int64_t>& places, const Tensor& x,
                                           const std::vector<Tensor>& weights,
                                           const std::vector<OptionalTensor>& biases,
                                           const std::vector<OptionalTensor>& a, const std::vector<OptionalTensor>& b,
                                           const std::vector<double>& scalings, const std::vector<double>& dropouts,
                                           bool wide_dropout, bool up_drops_first, const std::vector<int64_t>& drawn,
                                           bool gated, int64_t activation, int64_t keep);
std::vector<Tensor> packed_adapted_backward(
    const std::vector<OptionalTensor>& packed, const std::vector<int64_t>& layouts, const std::vector<double>& offsets,
    const std::vector<int64_t>& places, const Tensor& grad, const OptionalTensor& x, const std::vector<Tensor>& weights,
    const std::vector<OptionalTensor>& biases, const std::vector<OptionalTensor>& a,
    const std::vector<OptionalTensor>& b, const std::vector<double>& scalings, const std::vector<double>& dropouts,
    const std::vector<OptionalTensor>& masks, const OptionalTensor& gate, const OptionalTensor& up,
    const OptionalTensor& first_rows, const OptionalTensor& second_rows, bool gated, int64_t activation, int64_t needs);

// A quantised weight (quantized.h) as a tensor [out, in] of a floating dtype: `weight` is data, scales, code,
// nested_scales and nested_code, the last three if the format has them, and `layout` is out, in, block_rows, block and
// nested_block.
Tensor quantized_decode(const std::vector<OptionalTensor>& weight, const std::vector<int64_t>& layout, double offset,
                        torch::headeronly::ScalarType dtype);

// linear with such a weight.
Tensor quantized_linear(const Tensor& x, const std::vector<OptionalTensor>& weight, const std::vector<int64_t>& layout,
                        double offset, const OptionalTensor& bias, int64_t activation);

// mlp, or if `gated` gated_mlp, with such weights: the operands of its layers are consecutive in each list. If gated,
// two layers are gated_linear.
Tensor quantized_mlp(const Tensor& x, const std::vector<OptionalTensor>& weights, const std::vector<int64_t>& layouts,
                     const std::vector<double>& offsets, const std::vector<OptionalTensor>& biases, int64_t activation,
                     bool gated);

// How these would be computed, in the form that `plan` returns for the other ops; with one layer, quantized_linear.
std::string plan_quantized(const Tensor& x, const std::vector<OptionalTensor>& weights,
                           const std::vector<int64_t>& layouts, const std::vector<OptionalTensor>& biases,
                           int64_t activation, bool gated);

}  // namespace fused_mlp
