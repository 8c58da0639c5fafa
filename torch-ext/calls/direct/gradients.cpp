#include "gradients.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>

#include <array>
#include <utility>
#include <vector>

#include "../../global_state/modes.h"
#include "../../global_state/settings.h"
#include "../../ops/backward.h"
#include "../../ops/norms/norm_training.h"
#include "../answers.h"
#include "tensors.h"

namespace fused_mlp {
namespace {

#if defined(CUDA_KERNEL)
constexpr bool kSumsBiases = true;  // SUMS_BIASES of autograd/norms.py
#else
constexpr bool kSumsBiases = false;
#endif

// torch functions: whether a gradient is a batch of gradients, whether the running backward runs a node, and whether it
// keeps the graph; one that counts the references to an object; and an attribute, as in are_unchanged(), that holds as
// long as no tangents are computed. They live as long as the process.
PyObject *is_batched, *will_run, *keeps_graph, *count_references, *no_tangents;

// Attributes of a node.
struct NodeNames {
  PyObject* saved_tensors = PyUnicode_InternFromString("saved_tensors");
  PyObject* needs_input_grad = PyUnicode_InternFromString("needs_input_grad");
  PyObject* next_functions = PyUnicode_InternFromString("next_functions");
  PyObject* norm = PyUnicode_InternFromString("norm");
  PyObject* overwritten = PyUnicode_InternFromString("overwritten");
};
const NodeNames& node_names() {
  static const NodeNames made;
  return made;
}

using Found = std::vector<std::pair<Py_ssize_t, Tensor>>;  // gradients by the places of a node's inputs

// Places of a block's residual and of its norm's weight among its inputs, and their number (autograd/blocks.py).
enum BlockInput : Py_ssize_t { kResidual = kOperands, kNormWeight, kNormBias, kBlockInputs = 11 };

// Reads the arguments of a function; false if their number is wrong.
template <size_t kCount>
bool unpack(PyObject* given, PyObject* (&of)[kCount]) {
  if (PyTuple_Size(given) != kCount) PyErr_Format(PyExc_TypeError, "expected %d arguments, got %R", int{kCount}, given);
  for (size_t i = 0; i < kCount; ++i) of[i] = PyErr_Occurred() ? nullptr : PyTuple_GetItem(given, i);
  return !PyErr_Occurred();
}

// True if nothing has to observe how gradients are computed from an incoming one.
bool is_unseen(PyObject* grad) {
  if (is_batched == nullptr || settings.handles == nullptr || settings.handles == Py_None || grad == Py_None ||
      aoti_torch_grad_mode_is_enabled())
    return false;
  if (is_quiet() != kYes || said_by(settings.is_profiled) != kNo || are_unchanged(no_tangents) != kYes) {
    return false;
  }
  return truth(Owned(PyObject_CallFunctionObjArgs(is_batched, grad, nullptr)).get()) == kNo;
}

// True if the running backward is known to compute all gradients of a node.
bool will_all_run(PyObject* ctx) {
  const Owned edges(PyObject_GetAttr(ctx, node_names().next_functions));
  for (Py_ssize_t i = 0, count = edges ? PyTuple_Size(edges.get()) : -1; i < count; ++i) {
    PyObject* const node = PyTuple_GetItem(PyTuple_GetItem(edges.get(), i), 0);
    if (node == Py_None) continue;
    if (truth(Owned(PyObject_CallFunctionObjArgs(will_run, node, nullptr)).get()) != kYes) return false;
  }
  return edges && !PyErr_Occurred();
}

// Reads a tensor from a tuple; it may be None. `made` says that the forward computed it.
bool take(PyObject* tuple, Py_ssize_t place, OptionalTensor* tensor, bool made) {
  PyObject* const given = PyTuple_GetItem(tuple, place);
  return given == Py_None || (given != nullptr && take_tensor(given, tensor, made));
}

// A node, from its ctx: which inputs need gradients, and the values that it has saved.
struct Node {
  PyObject* const ctx;
  const Owned needs, saved;

  explicit Node(PyObject* ctx)
      : ctx(ctx),
        needs(PyObject_GetAttr(ctx, node_names().needs_input_grad)),
        saved(needs ? PyObject_GetAttr(ctx, node_names().saved_tensors) : nullptr) {}
  explicit operator bool() const { return static_cast<bool>(saved); }
  bool need(Py_ssize_t input) const { return PyTuple_GetItem(needs.get(), input) == Py_True; }
  bool take_saved(Py_ssize_t place, OptionalTensor* tensor) const { return take(saved.get(), place, tensor, false); }
};

// Returns a tuple with a gradient per input, None for those that were not found.
PyObject* placed(const Found& found, Py_ssize_t inputs) {
  std::vector<Tensor> tensors;
  for (const auto& [place, tensor] : found) tensors.push_back(tensor);
  const Owned list(tensors_of(tensors));
  Owned all(list ? PyTuple_New(inputs) : nullptr);
  if (!all) return nullptr;
  std::vector<PyObject*> of(inputs, Py_None);
  for (size_t i = 0; i < found.size(); ++i) of[found[i].first] = PyList_GetItem(list.get(), i);
  for (Py_ssize_t i = 0; i < inputs; ++i) {
    Py_INCREF(of[i]);
    PyTuple_SetItem(all.get(), i, of[i]);
  }
  return all.release();
}

// Computes gradients without the interpreter's lock; nullptr if that fails, and Python then recomputes them.
template <typename Compute>
PyObject* computed(Py_ssize_t inputs, const Compute& compute) {
  Found found;
  const bool succeeded = succeeds([&] {
    const Unlocked unlocked;
    compute(&found);
  });
  return succeeded ? placed(found, inputs) : nullptr;
}

// Returns the number of references to an object.
Py_ssize_t references(PyObject* object) {
  const Owned count(PyObject_CallFunctionObjArgs(count_references, object, nullptr));
  return count ? PyLong_AsSsize_t(count.get()) : PY_SSIZE_T_MAX;
}

// True if a tuple holds the only reference to one of its elements.
bool is_alone(PyObject* object) {
  static const Py_ssize_t least = [] {
    const Owned tuple(PyTuple_New(1));
    PyTuple_SetItem(tuple.get(), 0, PyList_New(0));
    return references(PyTuple_GetItem(tuple.get(), 0));
  }();
  return object == Py_None || references(object) <= least;
}

// The MLP of a node that save() set up (saving.h), or a single layer.
class NodeOfMlp {
 public:
  explicit NodeOfMlp(PyObject* ctx)
      : ctx_(ctx), own_(PyObject_GetAttr(ctx, names().own)), how_(PyObject_GetAttr(ctx, names().how)) {}

  // False if the node does not own its values: hooks have seen them, or they were freed.
  bool owns() const { return own_ && how_ && PyTuple_Check(own_.get()) && PyTuple_Size(own_.get()) == 2; }

  bool read(const Node& node) {
    for (Py_ssize_t i = 0; i < kSecondBias; ++i) {
      if (!node.take_saved(i, &operands_[i])) return false;
    }
    activation_ = PyLong_AsSsize_t(PyTuple_GetItem(how_.get(), 0));
    is_layer_ = PyTuple_GetItem(how_.get(), 2) == Py_None;
    PyObject* const up_first = PyTuple_GetItem(how_.get(), 1);
    if (up_first != Py_None) up_first_ = up_first == Py_True;
    layout_ = PyLong_AsSsize_t(PyTuple_GetItem(how_.get(), 3));
    if (!take(own_.get(), 0, &gate_, true) || !take(own_.get(), 1, &up_, true)) return false;
    const Answer keeps = said_by(keeps_graph);
    if (keeps == kError || PyErr_Occurred()) return false;
    if (keeps == kYes) return true;
    in_place_ = gate_ && is_alone(PyTuple_GetItem(own_.get(), 0)) && is_alone(PyTuple_GetItem(own_.get(), 1));
    const Owned nothing(PyTuple_New(0));
    return nothing && PyObject_SetAttr(ctx_, names().own, nothing.get()) == 0;  // autograd frees what it saves as well
  }

  Operand last_bias() const { return is_layer_ ? kBias : kSecondBias; }

  // Puts the gradients selected by `needs` at the operands' places, except that of x if x is not the node's input
  // (`has_x`). Returns the gradient of x.
  OptionalTensor add(const Tensor& grad, int64_t needs, bool has_x, Found* found) {
    const auto& [x, weight, up_weight, second_weight, bias, up_bias] = operands_;
    began_ = true;
    const std::vector<Tensor> of = is_layer_ ? projections_backward(grad, {}, {}, x, weight, {}, {}, needs)
                                   : in_place_
                                       ? training_backward_(grad, x, weight, up_weight, second_weight, bias, up_bias,
                                                            *gate_, up_, activation_, needs | layout_, up_first_)
                                       : training_backward(grad, x, weight, up_weight, second_weight, bias, up_bias,
                                                           gate_, up_, activation_, needs | layout_, up_first_);
    OptionalTensor of_x;
    size_t next = 0;
    for (Py_ssize_t i = 0; i < kOperands; ++i) {
      if ((needs >> i & 1) == 0) continue;
      const Tensor& gradient = of[next++];
      if (i == kX) of_x = gradient;
      if (i != kX || has_x) found->emplace_back(i, gradient);
    }
    return of_x;
  }

  // Returns the node to Python if there is no result.
  PyObject* or_left(PyObject* result) const {
    if (result != nullptr) return result;
    PyErr_Clear();
    PyObject_SetAttr(ctx_, names().own, own_.get());
    if (began_ && in_place_) PyObject_SetAttr(ctx_, node_names().overwritten, Py_True);
    return nullptr;
  }

 private:
  PyObject* const ctx_;
  const Owned own_, how_;
  std::array<OptionalTensor, kSecondBias> operands_;
  OptionalTensor gate_, up_;
  int64_t activation_ = 0, layout_ = 0;
  std::optional<bool> up_first_;
  bool is_layer_ = false, in_place_ = false, began_ = false;
};

int64_t bits_of(const Node& node, Py_ssize_t first, Py_ssize_t last) {
  int64_t bits = 0;
  for (Py_ssize_t i = first; i <= last; ++i) bits |= static_cast<int64_t>(node.need(i)) << i;
  return bits;
}

// A norm as saved by a node: its input, weight, bias, statistics and perhaps a mask, from `place` on.
struct NodeOfNorm {
  OptionalTensor x, weight, statistics, mask;
  double dropout = 0.0;
  int64_t code = 0;

  // `how` begins with eps and the code; the probability of a dropout may follow.
  bool read(const Node& node, Py_ssize_t place, PyObject* how, bool has_dropout) {
    if (how == nullptr || !PyTuple_Check(how)) return false;
    code = PyLong_AsSsize_t(PyTuple_GetItem(how, 1));
    if (has_dropout) dropout = PyFloat_AsDouble(PyTuple_GetItem(how, 2));
    const bool has_mask = PyTuple_Size(node.saved.get()) > place + 4;
    return node.take_saved(place, &x) && node.take_saved(place + 1, &weight) &&
           node.take_saved(place + 3, &statistics) && (!has_mask || node.take_saved(place + 4, &mask)) && statistics &&
           !PyErr_Occurred();
  }
};

// Gradients of a norm of residual + dropout(x).
struct OfSum {
  OptionalTensor total, weight, bias, dropped, behind;

  OfSum(const NodeOfNorm& norm, const Tensor& grad, bool of_x, bool of_residual, bool of_weight, bool of_bias,
        bool of_behind) {
    const bool drops = norm.mask.has_value();
    const std::array<std::pair<bool, OptionalTensor*>, 5> wanted{{{of_residual || (of_x && !drops), &total},
                                                                  {of_weight, &weight},
                                                                  {of_bias, &bias},
                                                                  {of_x && drops, &dropped},
                                                                  {of_behind, &behind}}};
    int64_t bits = 0;
    for (size_t i = 0; i < wanted.size(); ++i) bits |= static_cast<int64_t>(wanted[i].first) << i;
    const std::vector<Tensor> found = norm_backward(grad, *norm.x, norm.weight, *norm.statistics, std::nullopt,
                                                    norm.mask, norm.dropout, norm.code, bits);
    size_t next = 0;
    for (const auto& [want, tensor] : wanted) {
      if (want) *tensor = found[next++];
    }
    if (of_x && !drops) dropped = total;  // the same
    if (!of_residual) total.reset();
  }
};

void add(Found* found, Py_ssize_t place, const OptionalTensor& tensor) {
  if (tensor) found->emplace_back(place, *tensor);
}

PyObject* post_normed(PyObject* given) {
  PyObject* of[3];  // ctx, the gradients of the norm and of the sum
  if (!unpack(given, of)) return nullptr;
  PyObject *const ctx = of[0], *const in = of[1], *const of_sum = of[2];
  if (of_sum != Py_None || !is_unseen(in) || !will_all_run(ctx)) return nullptr;
  NodeOfMlp mlp(ctx);
  if (!mlp.owns()) return nullptr;
  const Node node(ctx);
  const Owned how(PyObject_GetAttr(ctx, node_names().norm));
  NodeOfNorm norm;
  OptionalTensor grad;
  if (!node || !norm.read(node, kOperands, how.get(), true) || !norm.x || !take_tensor(in, &grad)) return nullptr;
  if (!mlp.read(node)) return mlp.or_left(nullptr);
  const Operand last_bias = mlp.last_bias();
  const bool behind = kSumsBiases && node.need(last_bias);
  const int64_t bits = bits_of(node, kX, kSecondBias), needs = behind ? bits & ~(int64_t{1} << last_bias) : bits;
  const bool of_residual = node.need(kResidual), of_weight = node.need(kNormWeight), of_bias = node.need(kNormBias);
  return mlp.or_left(computed(kBlockInputs, [&](Found* found) {
    const OfSum of(norm, *grad, needs != 0, of_residual, of_weight, of_bias, behind);
    add(found, kResidual, of.total);
    add(found, kNormWeight, of.weight);
    add(found, kNormBias, of.bias);
    add(found, last_bias, of.behind);
    if (needs != 0) mlp.add(*of.dropped, needs, true, found);
  }));
}

PyObject* pre_normed(PyObject* given) {
  PyObject* of[2];  // ctx, the gradient of the result
  if (!unpack(given, of)) return nullptr;
  PyObject *const ctx = of[0], *const in = of[1];
  if (!is_unseen(in) || !will_all_run(ctx)) return nullptr;
  NodeOfMlp mlp(ctx);
  if (!mlp.owns()) return nullptr;
  const Node node(ctx);
  const Owned how(PyObject_GetAttr(ctx, node_names().norm));
  NodeOfNorm norm;
  OptionalTensor grad;
  if (!node || !norm.read(node, kOperands, how.get(), true) || !take_tensor(in, &grad)) return nullptr;
  if (!mlp.read(node)) return mlp.or_left(nullptr);
  const bool of_x = node.need(kX), of_weight = node.need(kNormWeight), of_bias = node.need(kNormBias);
  const bool of_normed = of_x || of_weight || of_bias;
  const int64_t needs = bits_of(node, kWeight, kSecondBias) | static_cast<int64_t>(of_normed);
  if (of_normed && !norm.x) return mlp.or_left(nullptr);
  return mlp.or_left(computed(kBlockInputs, [&](Found* found) {
    Tensor behind = *grad;
    if (norm.mask) {
      std::array<StableIValue, 3> stack{torch::stable::detail::from(*grad), torch::stable::detail::from(*norm.mask),
                                        torch::stable::detail::from(1.0 / (1.0 - norm.dropout))};
      TORCH_ERROR_CODE_CHECK(
          torch_call_dispatcher("aten::native_dropout_backward", "", stack.data(), TORCH_ABI_VERSION));
      behind = torch::stable::detail::to<Tensor>(stack[0]);
    }
    const OptionalTensor normed = mlp.add(behind, needs, false, found);
    if (!of_normed) return;
    const int64_t bits = (of_x ? kNeedsX : 0) | (of_weight ? kNeedsNormWeight : 0) | (of_bias ? kNeedsNormBias : 0);
    const std::vector<Tensor> of = norm_backward(*normed, *norm.x, norm.weight, *norm.statistics,
                                                 of_x ? grad : std::nullopt, std::nullopt, 0.0, norm.code, bits);
    size_t next = 0;
    if (of_x) found->emplace_back(kX, of[next++]);
    if (of_weight) found->emplace_back(kNormWeight, of[next++]);
    if (of_bias) found->emplace_back(kNormBias, of[next++]);
  }));
}

PyObject* recorded(PyObject* given) {
  constexpr Py_ssize_t kInputs = 10;
  PyObject* of[2];  // ctx, the gradient of the result
  if (!unpack(given, of)) return nullptr;
  PyObject *const ctx = of[0], *const in = of[1];
  if (!is_unseen(in) || !will_all_run(ctx)) return nullptr;
  NodeOfMlp mlp(ctx);
  if (!mlp.owns()) return nullptr;
  const Node node(ctx);
  OptionalTensor grad;
  if (!node || !take_tensor(in, &grad)) return nullptr;
  if (!mlp.read(node)) return mlp.or_left(nullptr);
  const int64_t needs = bits_of(node, kX, kSecondBias);
  return mlp.or_left(computed(kInputs, [&](Found* found) { mlp.add(*grad, needs, true, found); }));
}

PyObject* projected(PyObject* given) {
  constexpr Py_ssize_t kInputs = 7, kMost = 3;
  const Py_ssize_t layers = PyTuple_Size(given) - 1;
  if (layers < 1 || layers > kMost) return nullptr;
  PyObject *const ctx = PyTuple_GetItem(given, 0), *const first = PyTuple_GetItem(given, 1);
  if (!is_unseen(first) || !will_all_run(ctx)) return nullptr;
  const Node node(ctx);
  if (!node) return nullptr;
  std::array<OptionalTensor, kMost> grads;
  std::array<OptionalTensor, 1 + kMost> operands;
  for (Py_ssize_t i = 0; i < layers; ++i) {
    if (!take_tensor(PyTuple_GetItem(given, 1 + i), &grads[i])) return nullptr;
  }
  for (Py_ssize_t i = 0; i < std::ssize(operands); ++i) {
    if (!node.take_saved(i, &operands[i])) return nullptr;
  }
  const int64_t needs = bits_of(node, 0, kInputs - 1);
  return computed(kInputs, [&](Found* found) {
    const std::vector<Tensor> of =
        projections_backward(grads[0], grads[1], grads[2], operands[0], operands[1], operands[2], operands[3], needs);
    size_t next = 0;
    for (Py_ssize_t i = 0; i < kInputs; ++i) {
      if (needs >> i & 1) found->emplace_back(i, of[next++]);
    }
  });
}

PyObject* normed(PyObject* given) {
  constexpr Py_ssize_t kInputs = 6, kDifferentiable = 3;
  PyObject* of[2];  // ctx, the gradient of the result
  if (!unpack(given, of)) return nullptr;
  PyObject *const ctx = of[0], *const in = of[1];
  if (!is_unseen(in)) return nullptr;
  const Node node(ctx);
  const Owned how(node ? PyObject_GetAttr(ctx, names().how) : nullptr);
  NodeOfNorm norm;
  OptionalTensor grad;
  if (!node || !norm.read(node, 0, how.get(), false) || !norm.x || !take_tensor(in, &grad)) return nullptr;
  const int64_t needs = bits_of(node, 0, kDifferentiable - 1);
  return computed(kInputs, [&](Found* found) {
    const std::vector<Tensor> of =
        norm_backward(*grad, *norm.x, norm.weight, *norm.statistics, std::nullopt, std::nullopt, 0.0, norm.code, needs);
    size_t next = 0;
    for (Py_ssize_t i = 0; i < kDifferentiable; ++i) {
      if (needs >> i & 1) found->emplace_back(i, of[next++]);
    }
  });
}

PyObject* py_configure(PyObject*, PyObject* given) {
  PyObject* of[5];
  if (!unpack(given, of)) return nullptr;
  for (PyObject* each : of) Py_INCREF(each);
  is_batched = of[0], will_run = of[1], keeps_graph = of[2], count_references = of[3], no_tangents = of[4];
  Py_RETURN_NONE;
}

}  // namespace

PyMethodDef gradient_methods[] = {
    {"configure_backwards", py_configure, METH_VARARGS, nullptr},
    {"post_normed_backward", answered<post_normed>, METH_VARARGS, nullptr},
    {"pre_normed_backward", answered<pre_normed>, METH_VARARGS, nullptr},
    {"recorded_backward", answered<recorded>, METH_VARARGS, nullptr},
    {"projected_backward", answered<projected>, METH_VARARGS, nullptr},
    {"normed_backward", answered<normed>, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace fused_mlp
