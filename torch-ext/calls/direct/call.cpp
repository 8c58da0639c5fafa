#include "call.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "../../operands/activation.h"
#include "../../operands/dlpack.h"
#include "../../operands/rows.h"
#include "../answers.h"
#include "../plain_mlp.h"
#include "plain.h"

namespace fused_mlp {

bool is_contiguous(const dlpack::Tensor& tensor) {
  int64_t stride = 1;
  for (int d = tensor.dims; d-- > 0; stride *= tensor.sizes[d]) {
    if (tensor.sizes[d] != 1 && tensor.strides[d] != stride) return false;
  }
  return true;
}

namespace {

const dlpack::ExchangeApi* exchange = nullptr;
PyObject* is_negated = nullptr;
PyObject* empty_like = nullptr;
PyObject* is_profiled = nullptr;

// True if a function, called with one argument or none, returns a true value or raises.
bool true_or_raises(PyObject* function, PyObject* argument = nullptr) {
  const Owned said(PyObject_CallFunctionObjArgs(function, argument, nullptr));
  return !said || PyObject_IsTrue(said.get()) != 0;
}

std::optional<DType> dtype_of(const dlpack::DataType& type) {
  if (type == dlpack::kBFloat16) return DType::kBFloat16;
  if (type == dlpack::kFloat16) return DType::kFloat16;
  if (type == dlpack::kFloat32) return DType::kFloat32;
  return std::nullopt;
}

bool is_dense(const dlpack::Tensor& vector) { return vector.sizes[0] == 1 || vector.strides[0] == 1; }

// Reads an MLP from the operands of its op. False if they do not fit; a Python error may then be set.
class Reader {
 public:
  Reader(const DirectForm& form, PyObject* operands) : form_(form), operands_(operands) {}

  // Reads x.
  bool read_x(PlainMlp* mlp) {
    if (!read_tensor(at(0), kX, &x_) || x_.dims == 0) return false;
    const auto dtype = dtype_of(x_.dtype);
    const Rows rows(x_.sizes, x_.strides, x_.dims);
    if (!dtype || !rows.adjacent || rows.rows == 0 || rows.cols == 0) return false;
    mlp->dtype = *dtype;
    mlp->device = x_.device.index;
    mlp->x = {x_.data, rows.row_stride};
    mlp->rows = rows.rows;
    mlp->in = rows.cols;
    return true;
  }

  // Reads a norm of x whose weight is shared by all rows.
  bool read_norm_alone(PlainNorm* plain) {
    PlainMlp of_x{};
    if (!read_x(&of_x) || !read_norm(1, x_, &plain->norm)) return false;
    plain->norm.rounded = at(5) == Py_True;
    plain->dtype = of_x.dtype, plain->device = of_x.device, plain->x = of_x.x;
    plain->rows = of_x.rows, plain->cols = of_x.in;
    return plain->norm.weight.stride == 0 && plain->norm.bias.stride == 0;
  }

  // Reads a norm of rows like those of a tensor; its operands begin at `place`.
  bool read_norm_of(const dlpack::Tensor& x, Py_ssize_t place, Norm* norm) {
    x_ = x;
    return read_norm(place, x, norm);
  }

  bool read_others(PlainMlp* mlp) { return read_layers(mlp) && (!form_.block || read_block(mlp)); }

  // Creates the tensor of the result, with the sizes of x except for the last.
  PyObject* new_result(int64_t out) const {
    static PyObject* const new_empty = PyUnicode_InternFromString("new_empty");
    // This takes two thirds of the time of new_empty (measured on a CPU).
    if (out == x_.sizes[x_.dims - 1] && is_contiguous(x_))
      return PyObject_CallFunctionObjArgs(empty_like, at(0), nullptr);
    Owned sizes(PyTuple_New(x_.dims));
    for (int d = 0; sizes && d < x_.dims; ++d) {
      PyObject* const size = PyLong_FromSsize_t(d + 1 < x_.dims ? x_.sizes[d] : out);
      if (size == nullptr || PyTuple_SetItem(sizes.get(), d, size) != 0) return nullptr;
    }
    return sizes ? PyObject_CallMethodObjArgs(at(0), new_empty, sizes.get(), nullptr) : nullptr;
  }

 private:
  PyObject* at(Py_ssize_t place) const { return PyTuple_GetItem(operands_, place); }
  int64_t integer(Py_ssize_t place) const { return PyLong_AsSsize_t(at(place)); }

  static constexpr int kX = 0, kFeatures = -1;

  // Reads a non-empty tensor. Except for x itself, it must have this many dimensions, and the device and the dtype of
  // x. Features may have any number of dimensions, and be float32.
  bool read_tensor(PyObject* tensor, int dims, dlpack::Tensor* view) const {
    if (!read_directly(tensor, view)) return false;
    const bool wide = dims == kFeatures && view->dtype == dlpack::kFloat32;
    const bool fits = (dims == kFeatures || view->dims == dims) && (wide || view->dtype == x_.dtype);
    const bool alike = dims == kX || (fits && view->device == x_.device);
    return alike;
  }

  // Reads a weight with this many inputs.
  bool read_weight(Py_ssize_t place, int64_t in, Matrix* matrix, int64_t* out, bool* transposed) const {
    dlpack::Tensor weight;
    if (!read_tensor(at(place), 2, &weight) || weight.sizes[0] == 0 || weight.sizes[1] != in) return false;
    *transposed = weight.strides[1] != 1 && in != 1;
    if (*transposed && weight.strides[0] != 1) return false;
    *matrix = {weight.data, weight.strides[*transposed ? 1 : 0]};
    *out = weight.sizes[0];
    return true;
  }

  // Reads a vector; null for None.
  bool read_vector(Py_ssize_t place, int64_t size, const void** data) const {
    *data = nullptr;
    if (at(place) == Py_None) return true;
    dlpack::Tensor vector;
    if (!read_tensor(at(place), 1, &vector) || vector.sizes[0] != size || !is_dense(vector)) return false;
    *data = vector.data;
    return true;
  }

  // Reads layers with quantised weights.
  bool read_quantised(PlainMlp* mlp) {
    const Py_ssize_t biases = 1 + form_.weights, parts = form_.gated && !form_.packed ? 2 : 1;
    const PackedWeight* const weights = form_.quantised;
    PlainLayer &first = mlp->layers[0], &second = mlp->layers[1];
    mlp->count = form_.weights > parts ? 2 : 1;
    first.packed = &weights[0];
    first.up_packed = parts == 2 ? &weights[1] : nullptr;
    first.out = weights[0].n;
    first.activation = integer(biases + form_.weights);
    if (!read_vector(biases, first.out, &first.bias)) return false;
    if (parts == 2 && !read_vector(biases + 1, first.out, &first.up_bias)) return false;
    if (form_.packed && !split(mlp->dtype, &first)) return false;
    for (Py_ssize_t i = 0; i < form_.weights; ++i) {
      if (weights[i].k != (i < parts ? mlp->in : first.out) || weights[i].device != x_.device.index) return false;
    }
    if (first.up_packed != nullptr && first.up_packed->n != first.out) return false;
    if (mlp->count == 1) return true;
    second.packed = &weights[parts];
    second.out = weights[parts].n;
    second.activation = static_cast<int64_t>(Activation::kLinear);
    return read_vector(biases + parts, second.out, &second.bias);
  }

  bool read_layers(PlainMlp* mlp) {
    if (form_.quantised != nullptr) return read_quantised(mlp);
    const Py_ssize_t biases = 1 + form_.weights, parts = form_.gated && !form_.packed ? 2 : 1;
    PlainLayer& first = mlp->layers[0];
    mlp->count = form_.weights > parts ? 2 : 1;
    first.activation = integer(biases + form_.weights);
    first.up_weight = kNoMatrix;
    first.up_bias = nullptr;
    if (!read_weight(1, mlp->in, &first.weight, &first.out, &first.transposed) ||
        !read_vector(biases, first.out, &first.bias)) {
      return false;
    }
    if (form_.packed && !split(mlp->dtype, &first)) return false;
    if (parts == 2) {
      int64_t out;
      bool transposed;
      if (!read_weight(2, mlp->in, &first.up_weight, &out, &transposed) || out != first.out ||
          transposed != first.transposed || !read_vector(biases + 1, out, &first.up_bias)) {
        return false;
      }
    }
    if (mlp->count == 1) return true;
    PlainLayer& second = mlp->layers[1];
    second.up_weight = kNoMatrix;
    second.up_bias = nullptr;
    second.activation = static_cast<int64_t>(Activation::kLinear);
    return read_weight(1 + parts, first.out, &second.weight, &second.out, &second.transposed) &&
           read_vector(biases + parts, second.out, &second.bias);
  }

  // Splits a layer that packs gate and up into one with both.
  bool split(DType dtype, PlainLayer* layer) {
    if (layer->out % 2 != 0) return false;
    layer->out /= 2;
    const auto behind = [&](const void* data, int64_t elements) {
      return static_cast<const char*>(data) + elements * element_bytes(dtype);
    };
    if (layer->packed != nullptr) {
      for (int i = 0; i < 2; ++i) {
        const auto half = half_of(*layer->packed, i == 1);
        if (!half) return false;
        halves_[i] = *half;
      }
      layer->packed = &halves_[0], layer->up_packed = &halves_[1];
    } else {
      const int64_t stride = layer->weight.row_stride;
      const int64_t half = layer->transposed ? layer->out : layer->out * stride;
      layer->up_weight = {const_cast<char*>(behind(layer->weight.data, half)), stride};
    }
    if (layer->bias != nullptr) layer->up_bias = behind(layer->bias, layer->out);
    if (form_.up_first) {
      std::swap(layer->weight, layer->up_weight);
      std::swap(layer->packed, layer->up_packed);
      std::swap(layer->bias, layer->up_bias);
    }
    return true;
  }

  // Reads a norm's parameter per feature of rows like those of x, or of the residual; no features for None.
  bool read_features(Py_ssize_t place, const dlpack::Tensor& of, Features* features) const {
    *features = kNoFeatures;
    if (at(place) == Py_None) return true;
    dlpack::Tensor tensor;
    if (!read_tensor(at(place), kFeatures, &tensor)) return false;
    const Rows rows(tensor.sizes, tensor.strides, tensor.dims);
    const auto shared = rows_that_share(tensor.sizes, tensor.dims, of.sizes, of.dims);
    if (!shared || !rows.adjacent) return false;
    *features = {tensor.data, *shared, rows.rows > 1 ? rows.row_stride : 0, !(tensor.dtype == x_.dtype)};
    return true;
  }

  bool read_norm(Py_ssize_t place, const dlpack::Tensor& of, Norm* norm) const {
    norm->kind = static_cast<NormKind>(integer(place + 3));
    norm->eps = static_cast<float>(PyFloat_AsDouble(at(place + 2)));
    norm->residual = Residual::kNone;
    norm->factor = 1.0f;
    return read_features(place, of, &norm->weight) && read_features(place + 1, of, &norm->bias);
  }

  bool read_block(PlainMlp* mlp) const {
    const Py_ssize_t place = 2 * form_.weights + 2;
    const int64_t out = mlp->layers[mlp->count - 1].out;
    dlpack::Tensor residual;
    if (!read_tensor(at(place), x_.dims, &residual) || residual.sizes[x_.dims - 1] != out ||
        !std::equal(x_.sizes, x_.sizes + x_.dims - 1, residual.sizes)) {
      return false;
    }
    const Rows rows(residual.sizes, residual.strides, residual.dims);
    if (!rows.adjacent || !read_norm(place + 2, x_, &mlp->first) || !read_norm(place + 6, residual, &mlp->last)) {
      return false;
    }
    const bool norms_sum = at(place + 10) == Py_True;
    mlp->residual = {residual.data, rows.row_stride};
    mlp->last.residual = norms_sum ? Residual::kNormed : Residual::kAdded;
    mlp->last.factor = static_cast<float>(PyFloat_AsDouble(at(place + 1)));
    const auto scales = [](const Norm& norm) { return norm.kind == NormKind::kScale; };
    return !scales(mlp->first) && !(norms_sum && scales(mlp->last));
  }

  const DirectForm& form_;
  PyObject* const operands_;
  dlpack::Tensor x_;
  PackedWeight halves_[2];  // halves of a weight that packs gate and up
};

}  // namespace

bool configure_direct_calls(PyObject* exchange_api, PyObject* is_neg, PyObject* like, PyObject* profiled) {
  exchange = nullptr;
  if (exchange_api == Py_None) return true;
  const void* const found = PyCapsule_GetPointer(exchange_api, dlpack::kCapsuleName);
  if (found == nullptr) return false;
  const auto* const api = static_cast<const dlpack::ExchangeApi*>(found);
  if (api->major_version != dlpack::kMajorVersion || api->read == nullptr) return true;
  Py_INCREF(is_neg);
  Py_INCREF(like);
  Py_INCREF(profiled);
  is_negated = is_neg;
  empty_like = like;
  is_profiled = profiled;
  exchange = api;
  return true;
}

bool may_call_directly() { return exchange != nullptr && !true_or_raises(is_profiled); }

bool read_codes_directly(PyObject* tensor, dlpack::Tensor* view) {
  return exchange->read(tensor, view) == 0 && view->data != nullptr && view->byte_offset == 0;
}

bool read_directly(PyObject* tensor, dlpack::Tensor* view) {
  return read_codes_directly(tensor, view) && !true_or_raises(is_negated, tensor);
}

bool read_sizes(PyObject* tensor, dlpack::Tensor* view) {
  if (exchange == nullptr || !is_tensor(tensor)) return false;
  if (read_codes_directly(tensor, view) && view->dims > 0) return true;
  PyErr_Clear();  // for example for a tensor without memory
  return false;
}

bool read_shape(PyObject* tensor, dlpack::Tensor* view) {
  if (exchange->read(tensor, view) == 0) return true;
  PyErr_Clear();
  return false;
}

bool read_dtype(const dlpack::Tensor& tensor, DType* dtype) {
  const auto found = dtype_of(tensor.dtype);
  if (found) *dtype = *found;
  return found.has_value();
}

bool read_norm_directly(PyObject* operands, Py_ssize_t place, const dlpack::Tensor& x, Norm* norm) {
  constexpr DirectForm kForm{};
  const bool rounded = norm->rounded;
  const bool read = Reader(kForm, operands).read_norm_of(x, place, norm);
  norm->rounded = rounded;
  return read && !PyErr_Occurred();
}

PyObject* computed_directly(PyObject* x, const std::function<bool(void*)>& compute) {
  Owned out(PyObject_CallFunctionObjArgs(empty_like, x, nullptr));
  dlpack::Tensor view;
  if (!out || exchange->read(out.get(), &view) != 0) return nullptr;
  bool computed = false;
  const bool succeeded = succeeds([&] {
    const Unlocked unlocked;
    computed = compute(view.data);
  });
  return succeeded && computed ? out.release() : nullptr;
}

PyObject* norm_or_operands(PyObject* operands, bool followed) {
  if (exchange == nullptr) return nullptr;
  constexpr DirectForm kForm{};
  PlainNorm norm{};
  Reader reader(kForm, operands);
  const bool fits = reader.read_norm_alone(&norm) && !PyErr_Occurred();
  if (!fits) {
    is_answer();  // the module's own code reports what is wrong
    return nullptr;
  }
  const auto left = [&] {
    Py_INCREF(operands);
    return operands;
  };
  if (followed || true_or_raises(is_profiled)) return PyErr_Occurred() ? nullptr : left();
  Owned out(reader.new_result(norm.cols));
  dlpack::Tensor view;
  if (!out || exchange->read(out.get(), &view) != 0) return nullptr;
  bool computed = false;
  const bool succeeded = succeeds([&] {
    const Unlocked unlocked;
    computed = norm_directly(norm, view.data);
  });
  if (!succeeded) return nullptr;
  return computed ? out.release() : left();
}

PyObject* call_directly(const DirectForm& form, PyObject* operands) {
  if (exchange == nullptr) return nullptr;
  PlainMlp mlp{};
  Reader reader(form, operands);
  std::function<void(void*)> compute;
  const bool known = form.quantised != nullptr;
  const bool fits = reader.read_x(&mlp) && (known || may_be_direct(mlp.dtype, mlp.rows)) &&
                    !true_or_raises(is_profiled) && reader.read_others(&mlp) && !PyErr_Occurred() &&
                    succeeds([&] { compute = plan_direct(mlp); });
  if (!fits || !compute) {
    is_answer();  // the op reports what is wrong
    return nullptr;
  }
  Owned out(reader.new_result(mlp.layers[mlp.count - 1].out));
  dlpack::Tensor view;
  if (!out || exchange->read(out.get(), &view) != 0) return nullptr;
  const bool computed = succeeds([&] {
    const Unlocked unlocked;
    compute(view.data);
  });
  return computed ? out.release() : nullptr;
}

}  // namespace fused_mlp
