#include "ops.h"

#if defined(CUDA_KERNEL)
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>
#else
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#endif

#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "../../global_state/modes.h"
#include "../../global_state/settings.h"
#include "../../torch_binding.h"
#include "../answers.h"
#include "tensors.h"

namespace fused_mlp {
namespace {

#if defined(CUDA_KERNEL)
constexpr auto add_tensors = aoti_torch_cuda_add_Tensor;
#else
constexpr auto add_tensors = aoti_torch_cpu_add_Tensor;
#endif

// An operand as a parameter of an op's function: the value kept for the call, and whether it can be read.
template <typename Parameter>
struct Operand;

template <>
struct Operand<const Tensor&> {
  using Kept = OptionalTensor;
  static bool read(PyObject* given, Kept* kept) { return take_tensor(given, kept); }
  static const Tensor& of(const Kept& kept) { return *kept; }
};

template <>
struct Operand<const OptionalTensor&> {
  using Kept = OptionalTensor;
  static bool read(PyObject* given, Kept* kept) { return given == Py_None || take_tensor(given, kept); }
  static const OptionalTensor& of(const Kept& kept) { return kept; }
};

template <typename Value>
struct ValueOperand {
  using Kept = Value;
  static Value of(const Kept& kept) { return kept; }
};

template <>
struct Operand<int64_t> : ValueOperand<int64_t> {
  static bool read(PyObject* given, Kept* kept) {
    if (!PyLong_Check(given)) return false;
    *kept = PyLong_AsSsize_t(given);
    return true;
  }
};

template <>
struct Operand<double> : ValueOperand<double> {
  static bool read(PyObject* given, Kept* kept) {
    if (!PyFloat_Check(given)) return false;
    *kept = PyFloat_AsDouble(given);
    return true;
  }
};

template <>
struct Operand<bool> : ValueOperand<bool> {
  static bool read(PyObject* given, Kept* kept) {
    *kept = given == Py_True;
    return *kept || given == Py_False;
  }
};

template <>
struct Operand<std::optional<bool>> : ValueOperand<std::optional<bool>> {
  static bool read(PyObject* given, Kept* kept) {
    if (given != Py_None) *kept = given == Py_True;
    return given == Py_None || given == Py_True || given == Py_False;
  }
};

// A list or tuple of the values kept for its elements.
template <typename Element, typename Of>
struct ListOperand {
  using Kept = std::vector<Element>;
  static bool read(PyObject* given, Kept* kept) {
    const bool in_tuple = PyTuple_Check(given);
    if (!in_tuple && !PyList_Check(given)) return false;
    const Py_ssize_t count = PyObject_Size(given);
    kept->reserve(count);
    for (Py_ssize_t i = 0; i < count; ++i) {
      typename Operand<Of>::Kept element{};
      PyObject* const at = in_tuple ? PyTuple_GetItem(given, i) : PyList_GetItem(given, i);
      if (!Operand<Of>::read(at, &element)) return false;
      kept->push_back(Operand<Of>::of(element));
    }
    return true;
  }
  static const Kept& of(const Kept& kept) { return kept; }
};

template <>
struct Operand<const std::vector<Tensor>&> : ListOperand<Tensor, const Tensor&> {};
template <>
struct Operand<const std::vector<OptionalTensor>&> : ListOperand<OptionalTensor, const OptionalTensor&> {};
template <>
struct Operand<const std::vector<int64_t>&> : ListOperand<int64_t, int64_t> {};
template <>
struct Operand<const std::vector<double>&> : ListOperand<double, double> {};

using fused_mlp::tensors_of;

template <typename... Tensors>
PyObject* tensors_of(const std::tuple<Tensors...>& found) {
  return std::apply([](const auto&... each) { return tensors_of(std::vector<Tensor>{each...}); }, found);
}

// Calls an op's function into `*found`, if nothing has to observe the call. False if the dispatcher has to call the op;
// a Python error may then be set.
template <typename Result, typename... Parameters, size_t... kPlaces>
bool call(Result (*op)(Parameters...), PyObject* operands, PyObject** found, std::index_sequence<kPlaces...>) {
  constexpr size_t kCount = sizeof...(Parameters);
  if (settings.handles == Py_None || PyTuple_Size(operands) != kCount) return false;
  if (is_quiet() != kYes || said_by(settings.is_profiled) != kNo) return false;
  std::tuple<typename Operand<Parameters>::Kept...> kept;
  if (!(Operand<Parameters>::read(PyTuple_GetItem(operands, kPlaces), &std::get<kPlaces>(kept)) && ...)) return false;
  const std::tuple<Parameters...> given{Operand<Parameters>::of(std::get<kPlaces>(kept))...};
  if (PyErr_Occurred()) return false;
  std::optional<Result> result;
  const bool succeeded = succeeds([&] {
    const Unlocked unlocked;
    result.emplace(std::apply(op, given));
  });
  *found = succeeded ? tensors_of(*result) : nullptr;
  return true;
}

template <typename Result, typename... Parameters>
bool call(Result (*op)(Parameters...), PyObject* operands, PyObject** found) {
  return call(op, operands, found, std::index_sequence_for<Parameters...>());
}

// x + mlp(norm(x)) and norm(residual + dropout(mlp(x))) as one call. They return the result, the results of the norm's
// op, and the values of gate and, if it exists, up. `keep` is empty if the MLP is a single layer.
std::vector<Tensor> pre_normed_forward(const Tensor& x, const Tensor& weight, const OptionalTensor& up_weight,
                                       const OptionalTensor& second_weight, const OptionalTensor& bias,
                                       const OptionalTensor& up_bias, const OptionalTensor& second_bias,
                                       const OptionalTensor& norm_weight, const OptionalTensor& norm_bias, double eps,
                                       int64_t norm, int64_t activation, bool keep, std::optional<bool> up_first) {
  const auto [normed, statistics] = norm_forward(x, norm_weight, norm_bias, eps, norm, false);
  const auto [out, gate, up] = training_forward(normed, weight, up_weight, second_weight, bias, up_bias, second_bias,
                                                activation, keep, up_first);
  AtenTensorHandle sum = nullptr;
  TORCH_ERROR_CODE_CHECK(add_tensors(x.get(), out.get(), 1.0, &sum));
  std::vector<Tensor> found{Tensor(sum), normed, statistics, gate};
  if (up_weight) found.push_back(up);
  return found;
}

std::vector<Tensor> post_normed_forward(const Tensor& x, const Tensor& weight, const OptionalTensor& up_weight,
                                        const OptionalTensor& second_weight, const OptionalTensor& bias,
                                        const OptionalTensor& up_bias, const OptionalTensor& second_bias,
                                        const Tensor& residual, const OptionalTensor& norm_weight,
                                        const OptionalTensor& norm_bias, double eps, int64_t norm, int64_t activation,
                                        std::optional<bool> up_first, std::optional<bool> keep, double dropout) {
  std::vector<Tensor> kept;
  const auto result = [&] {
    if (!keep) return projections_forward(x, weight, {}, {}, bias, {}, {})[0];
    const auto [out, gate, up] =
        training_forward(x, weight, up_weight, second_weight, bias, up_bias, second_bias, activation, *keep, up_first);
    kept.push_back(gate);
    if (up_weight) kept.push_back(up);
    return out;
  }();
  std::vector<Tensor> found = sum_norm_forward(result, residual, norm_weight, norm_bias, eps, norm, dropout);
  found.insert(found.end(), kept.begin(), kept.end());
  return found;
}

// Without the name of an op, returns None for calls that the dispatcher has to make.
template <auto kOp, PyObject* Names::* kName = nullptr>
PyObject* past_dispatcher(PyObject*, PyObject* operands) {
  PyObject* found = nullptr;
  if (call(kOp, operands, &found)) return found;
  if (!is_answer()) return nullptr;
  if constexpr (kName == nullptr) Py_RETURN_NONE;
  PyObject* const op = item(settings.ops, names().*kName);
  return op == nullptr ? nullptr : PyObject_CallObject(op, operands);
}

}  // namespace

PyMethodDef direct_op_methods[] = {
    {"adapted_forward", past_dispatcher<adapted_forward, &Names::adapted_forward>, METH_VARARGS, nullptr},
    {"adapted_backward", past_dispatcher<adapted_backward, &Names::adapted_backward>, METH_VARARGS, nullptr},
    {"packed_adapted_forward", past_dispatcher<packed_adapted_forward>, METH_VARARGS, nullptr},
    {"packed_adapted_backward", past_dispatcher<packed_adapted_backward>, METH_VARARGS, nullptr},
    {"norm_forward", past_dispatcher<norm_forward, &Names::norm_forward>, METH_VARARGS, nullptr},
    {"sum_norm_forward", past_dispatcher<sum_norm_forward, &Names::sum_norm_forward>, METH_VARARGS, nullptr},
    {"norm_backward", past_dispatcher<norm_backward, &Names::norm_backward>, METH_VARARGS, nullptr},
    {"pre_normed_forward", past_dispatcher<pre_normed_forward>, METH_VARARGS, nullptr},
    {"post_normed_forward", past_dispatcher<post_normed_forward>, METH_VARARGS, nullptr},
    {"projections_forward", past_dispatcher<projections_forward, &Names::projections_forward>, METH_VARARGS, nullptr},
    {"projections_backward", past_dispatcher<projections_backward, &Names::projections_backward>, METH_VARARGS,
     nullptr},
    {"rotary", past_dispatcher<rotary, &Names::rotary>, METH_VARARGS, nullptr},
    {"training_forward", past_dispatcher<training_forward, &Names::training_forward>, METH_VARARGS, nullptr},
    {"training_backward", past_dispatcher<training_backward, &Names::training_backward>, METH_VARARGS, nullptr},
    {"training_backward_", past_dispatcher<training_backward_, &Names::training_backward_>, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace fused_mlp
