#include "packed_layer.h"

#include "../../global_state/settings.h"
#include "../../operands/dlpack.h"
#include "../direct/call.h"
#include "../parts.h"
#include "../plain_mlp.h"

namespace fused_mlp {
namespace {

// The nested_block of an FP8 weight whose layer rounds x too; scaled kernels may be faster than its own product.
constexpr int64_t kRoundsX = 1;

// How classes of layers store their weights.
enum Form : Py_ssize_t { kFourBits, kBlocked, kInt8, kRows, kTensor, kTiles };
enum KnownField : Py_ssize_t { kUnchanged, kForm, kWeightClass };

#if defined(CUDA_KERNEL)
constexpr int32_t kDeviceType = 2;  // DLPack's number
#else
constexpr int32_t kDeviceType = 1;
#endif

bool is_on(const dlpack::Tensor& tensor, int32_t index) { return tensor.device == dlpack::Device{kDeviceType, index}; }

bool is_false_or_absent(PyObject* state, PyObject* name) {
  PyObject* const value = item(state, name);
  return value == nullptr ? PyErr_Occurred() == nullptr : truth(value) == kNo;
}

// Reads the contents of a dictionary.
class Held {
 public:
  explicit Held(PyObject* dictionary) : dictionary_(dictionary) {}

  PyObject* at(PyObject* name) const { return item(dictionary_, name); }
  bool lacks(PyObject* name) const { return at(name) == nullptr && PyErr_Occurred() == nullptr; }

  // Reads an integer of at least 1.
  bool integer(PyObject* name, int64_t* value) const { return positive(at(name), value); }

  // Reads both integers of a tuple or list of two.
  static bool pair(PyObject* both, int64_t* first, int64_t* second) {
    const bool is_tuple = both != nullptr && PyTuple_Check(both);
    if (!is_tuple && (both == nullptr || !PyList_Check(both))) return false;
    const auto place = [&](Py_ssize_t i) { return is_tuple ? PyTuple_GetItem(both, i) : PyList_GetItem(both, i); };
    return PyObject_Size(both) == 2 && positive(place(0), first) && positive(place(1), second);
  }

  // Reads a contiguous tensor of floats, of torch's own class.
  bool floats(PyObject* name, PyObject* kind, int64_t count, int32_t device, const void** data) const {
    dlpack::Tensor view;
    PyObject* const tensor = at(name);
    if (tensor == nullptr || class_of(tensor) != kind || !read_directly(tensor, &view)) return false;
    *data = view.data;
    return view.dtype == dlpack::kFloat32 && is_on(view, device) && is_contiguous(view) && elements(view) == count;
  }

  static int64_t elements(const dlpack::Tensor& view) {
    int64_t count = 1;
    for (int d = 0; d < view.dims; ++d) count *= view.sizes[d];
    return count;
  }

 private:
  static bool positive(PyObject* value, int64_t* into) {
    if (value == nullptr || !PyLong_Check(value)) return false;
    *into = PyLong_AsSsize_t(value);
    return *into > 0;
  }

  PyObject* dictionary_;
};

// Reads the number in an offset's tensor, if the host has already waited for it (models/parts/quantized.py).
bool read_offset(PyObject* offset, double* value) {
  if (offset == nullptr || class_of(offset) != settings.tensor) return false;
  const Owned key(PyLong_FromSsize_t(reinterpret_cast<Py_ssize_t>(offset)));
  PyObject* const known = key ? item(settings.offsets, key.get()) : nullptr;  // (a weak reference, version, number)
  if (known == nullptr || PyWeakref_GetObject(PyTuple_GetItem(known, 0)) != offset) return false;
  const Owned version(PyObject_GetAttr(offset, names().version));
  if (!version || PyLong_AsSsize_t(version.get()) != PyLong_AsSsize_t(PyTuple_GetItem(known, 1))) return false;
  *value = PyFloat_AsDouble(PyTuple_GetItem(known, 2));
  return PyErr_Occurred() == nullptr;
}

bool read_nested(const Held& state, PackedWeight* w) {
  const Names& n = names();
  PyObject* const second = state.at(n.state2);
  PyObject* const of_second = second == nullptr || second == Py_None ? nullptr : state_of(second);
  if (of_second == nullptr || !read_offset(state.at(n.offset), &w->offset)) return false;
  const Held nested(of_second);
  dlpack::Tensor scales;
  PyObject* const bytes = state.at(n.absmax);
  if (bytes == nullptr || class_of(bytes) != settings.tensor || !read_codes_directly(bytes, &scales)) return false;
  w->scales = scales.data;
  if (!(scales.dtype == dlpack::kUint8) || !is_on(scales, w->device) || !is_contiguous(scales)) return false;
  if (Held::elements(scales) != w->blocks() || !nested.integer(n.blocksize, &w->nested_block)) return false;
  const void *floats, *code;
  if (!nested.floats(n.absmax, settings.tensor, ceil_div(w->blocks(), w->nested_block), w->device, &floats) ||
      !nested.floats(n.code, settings.tensor, 256, w->device, &code)) {
    return false;
  }
  w->nested_scales = static_cast<const float*>(floats);
  w->nested_code = static_cast<const float*>(code);
  return true;
}

// Reads a four-bit layer of bitsandbytes.
bool read_four_bits(const Held& layer, PyObject* weight, PyObject* dtype, PackedWeight* w) {
  const Names& n = names();
  if (layer.at(n.compute_dtype) != dtype || layer.at(n.compute_type_is_set) != Py_True) return false;
  PyObject* const of_weight = state_of(weight);
  PyObject* const packed = of_weight == nullptr ? nullptr : item(of_weight, n.quant_state);
  PyObject* const fields = packed == nullptr || packed == Py_None ? nullptr : state_of(packed);
  if (fields == nullptr) return false;
  const Held state(fields);
  PyObject *const format = state.at(n.quant_type), *const nested = state.at(n.nested);
  PyObject* const codes = format == nullptr ? nullptr : item(settings.codes, format);
  if (codes == nullptr || !is_false_or_absent(fields, n.packed_for_cpu) || !is_false_or_absent(fields, n.ipex)) {
    return false;
  }
  if (!Held::pair(state.at(n.shape), &w->n, &w->k) || !state.integer(n.blocksize, &w->block)) return false;
  dlpack::Tensor data, code;
  if (!read_codes_directly(weight, &data) || !is_on(data, data.device.index) || !is_contiguous(data)) return false;
  const Owned index(PyLong_FromSsize_t(data.device.index));
  PyObject* const of_device = index ? item(codes, index.get()) : nullptr;
  if (of_device == nullptr || !read_codes_directly(of_device, &code)) return false;
  w->coding = Coding::kFourBits;
  w->device = data.device.index;
  w->data = data.data;
  w->code = static_cast<const float*>(code.data);
  w->block_rows = 1;
  if (Held::elements(data) * data.dtype.bits != w->bytes() * 8) return false;
  if (nested == Py_True) return read_nested(state, w);
  return nested == Py_False && state.floats(n.absmax, settings.tensor, w->blocks(), w->device, &w->scales);
}

// Reads FP8 or int8 values that kernels support, by the rule of blocked_refusal() in dispatch.py.
bool read_values(PyObject* values, PackedWeight* w) {
  dlpack::Tensor data;
  if (!read_codes_directly(values, &data) || !is_on(data, data.device.index)) return false;
  const bool int8 = data.dtype == dlpack::kInt8;
  if (!(int8 || data.dtype == dlpack::kFp8) || data.dims != 2 || !is_contiguous(data)) return false;
  w->coding = int8 ? Coding::kInt8 : Coding::kFp8;
  w->device = data.device.index;
  w->data = data.data;
  w->n = data.sizes[0], w->k = data.sizes[1];
  return w->k % 64 == 0 && w->n % 8 == 0;
}

// Reads a transformers FP8 layer with scales per block. Its product supports any dtype.
bool read_blocked(const Held& layer, const Held& parameters, PyObject* weight, PackedWeight* w) {
  const Names& n = names();
  PyObject *const scheme = layer.at(n.activation_scheme), *const scales_of_x = parameters.at(n.activation_scale);
  if (scheme == nullptr || !PyUnicode_Check(scheme) || PyUnicode_CompareWithASCIIString(scheme, "dynamic") != 0) {
    return false;
  }
  if ((scales_of_x != nullptr && scales_of_x != Py_None) || !layer.lacks(n.activation_scale) ||
      !layer.lacks(n.scale_inv)) {
    return false;
  }
  if (!read_values(weight, w) || w->coding != Coding::kFp8) return false;
  PyObject* const block = layer.at(n.block_size);
  w->block_rows = w->n, w->block = w->k;
  if (block != nullptr && block != Py_None && !Held::pair(block, &w->block_rows, &w->block)) return false;
  if (w->k > w->block && w->block != 128 && w->block != 256 && w->block != 512) return false;
  w->nested_block = kRoundsX;
  return parameters.floats(n.scale_inv, settings.parameter, w->blocks(), w->device, &w->scales);
}

// Reads values with a scale per row, or one in all, that is of this class and divided by a number.
bool read_rows(PyObject* values, const Held& holder, PyObject* scales, PyObject* kind, int64_t divisor,
               PackedWeight* w) {
  if (values == nullptr || !read_values(values, w)) return false;
  w->block_rows = 1, w->block = w->k, w->nested_block = divisor;
  if (holder.floats(scales, kind, w->n, w->device, &w->scales)) return true;
  w->block_rows = w->n;
  return holder.floats(scales, kind, 1, w->device, &w->scales);
}

// Reads an int8 layer of bitsandbytes, whose first call moves values and scales from the weight into its state.
bool read_int8(const Held& layer, PyObject* weight, PackedWeight* w) {
  const Names& n = names();
  PyObject* const state = layer.at(n.of_matmul);
  PyObject *const kept = state == nullptr ? nullptr : state_of(state), *const fresh = state_of(weight);
  if (kept == nullptr || fresh == nullptr || !is_false_or_absent(kept, n.is_wide)) return false;
  PyObject* const of_weight = item(fresh, n.int8_data);
  const Held holder(of_weight == nullptr || of_weight == Py_None ? kept : fresh);
  PyObject* const values = holder.at(n.int8_data);
  if (values == nullptr || class_of(values) != settings.tensor) return false;
  return read_rows(values, holder, n.int8_scales, settings.tensor, 127, w) && w->coding == Coding::kInt8;
}

// Reads a torchao weight. Products that round x to int8, or limit it, are not supported.
bool read_tensor(PyObject* weight, PackedWeight* w) {
  const Names& n = names();
  PyObject* const state = state_of(weight);
  if (state == nullptr) return false;
  const Held held(state);
  const auto has = [&](PyObject* name) { return !held.lacks(name) && held.at(name) != Py_None; };
  PyObject* const values = held.at(n.tensor_data);
  if (values == nullptr || class_of(values) != settings.tensor || has(n.on_input[0]) || has(n.on_input[1]))
    return false;
  const bool rounds = has(n.on_input[2]);
  if (!read_rows(values, held, n.tensor_scale, settings.tensor, 1, w)) return false;
  if (w->coding == Coding::kFp8) w->nested_block = rounds ? kRoundsX : 0;
  if (rounds) {
    PyObject* const rounding = held.at(n.on_input[2]);
    for (PyObject* bound : n.input_bounds) {
      if (w->coding == Coding::kInt8 || has_attribute(rounding, bound, Py_None) != kYes) return false;
    }
  }
  int64_t rows, columns;
  return Held::pair(held.at(n.block_size), &rows, &columns) && columns == w->k && (rows == 1 || rows == w->n);
}

// Reads a torchao weight of int4 in tiles.
bool read_tiles(PyObject* weight, PackedWeight* w) {
  const Names& n = names();
  PyObject* const state = state_of(weight);
  if (state == nullptr) return false;
  const Held held(state);
  PyObject *const values = held.at(n.tensor_data), *const pairs = held.at(n.tile_scales);
  if (values == nullptr || pairs == nullptr || class_of(values) != settings.tensor ||
      class_of(pairs) != settings.tensor || !(held.lacks(n.on_input[0]) || held.at(n.on_input[0]) == Py_None)) {
    return false;
  }
  dlpack::Tensor data, scales, shape;
  if (!read_codes_directly(values, &data) || !read_directly(pairs, &scales) || !read_shape(weight, &shape))
    return false;
  if (!is_on(data, data.device.index) || !is_on(scales, data.device.index) || !is_contiguous(data) ||
      !is_contiguous(scales) || !(data.dtype == dlpack::kInt32) || !(scales.dtype == dlpack::kBFloat16) ||
      data.dims != 4 || shape.dims != 2 || !Held::pair(held.at(n.block_size), &w->block_rows, &w->block)) {
    return false;
  }
  w->coding = Coding::kInt4Tiles;
  w->device = data.device.index;
  w->data = data.data, w->scales = scales.data;
  w->n = shape.sizes[0], w->k = shape.sizes[1], w->nested_block = data.sizes[1] * Tiles::kColumns;
  const Tiles tiles(*w);
  return w->block_rows == 1 && w->block % 64 == 0 && tiles.k >= w->k && tiles.k % w->block == 0 &&
         data.sizes[2] == Tiles::kLanes && data.sizes[3] == Tiles::kWords && Held::elements(data) == tiles.words() &&
         Held::elements(scales) == tiles.k / w->block * tiles.n * 2;
}

bool read(Form form, const Held& layer, const Held& parameters, PyObject* weight, PyObject* dtype, PackedWeight* w) {
  switch (form) {
    case kFourBits:
      return read_four_bits(layer, weight, dtype, w);
    case kBlocked:
      return read_blocked(layer, parameters, weight, w);
    case kInt8:
      return read_int8(layer, weight, w);
    case kRows:
      return layer.lacks(names().scale_of_rows) &&
             read_rows(weight, parameters, names().scale_of_rows, settings.parameter, kRoundsX, w);
    case kTensor:
      return read_tensor(weight, w);
    case kTiles:
      return read_tiles(weight, w);
  }
  return false;
}

// True if kernels for few rows read tiled int4 weights, by the rule of _may_stream() in dispatch.py. Their product
// rounds x to bfloat16.
Answer takes_tiles(const PackedWeights& weights, PyObject* x) {
  dlpack::Tensor view;
  if (!read_directly(x, &view) || !(view.dtype == dlpack::kBFloat16)) return PyErr_Occurred() ? kError : kNo;
  const bool streams = std::all_of(weights.of, weights.of + weights.count, [](const PackedWeight& weight) {
    const int64_t blocks = weight.block / 64;
    return weight.in_tiles() && weight.k % 64 == 0 && (weight.block >= weight.k || (blocks & (blocks - 1)) == 0);
  });
  return streams ? kYes : kError;  // others may be decoded
}

}  // namespace

PyObject* known_by_weight(PyObject* layer) {
  PyObject* const state = class_of(layer) == settings.linear ? state_of(layer) : nullptr;
  PyObject* const parameters = state == nullptr ? nullptr : item(state, names().parameters);
  PyObject* const weight = parameters == nullptr ? nullptr : item(parameters, names().weight);
  return weight == nullptr ? nullptr : item(settings.quantised, class_of(weight));
}

Answer read_packed(PyObject* layer, PyObject* known, bool recording, PyObject* dtype, PyObject* operands,
                   Py_ssize_t weight_place, Py_ssize_t bias_place, PackedWeights* weights) {
  const Names& n = names();
  PyObject* const state = state_of(layer);
  if (state == nullptr || weights->count == PackedWeights::kMost || !may_call_directly()) {
    return PyErr_Occurred() ? kError : kNo;
  }
  Answer said = is_bare(layer, state, recording, true);
  if (said == kYes) said = are_unchanged(PyTuple_GetItem(known, kUnchanged));
  if (said != kYes) return said;
  const Held held(state);
  PyObject* const dictionary = held.at(n.parameters);
  if (dictionary == nullptr || !PyDict_Check(dictionary) || !held.lacks(n.weight) || !held.lacks(n.bias)) {
    return PyErr_Occurred() ? kError : kNo;
  }
  const Held parameters(dictionary);
  PyObject *const weight = parameters.at(n.weight), *const bias = parameters.at(n.bias);
  if (weight == nullptr || bias == nullptr || class_of(weight) != PyTuple_GetItem(known, kWeightClass)) {
    return PyErr_Occurred() ? kError : kNo;
  }
  if (bias != Py_None && class_of(bias) != settings.parameter) return kNo;
  PackedWeight* const found = &weights->of[weights->count];
  *found = {};
  const Form form = static_cast<Form>(PyLong_AsSsize_t(PyTuple_GetItem(known, kForm)));
  if (!read(form, held, parameters, weight, dtype, found)) return PyErr_Occurred() ? kError : kNo;
  ++weights->count;
  said = put(operands, weight_place, form == kFourBits ? weight : Py_None);
  return said == kYes ? put(operands, bias_place, bias) : said;
}

Answer takes_rows(const PackedWeights& weights, PyObject* x) {
  if (weights.in_four_bits()) return kYes;
  bool rounds = true;  // by the rule of _may_round_rows() in dispatch.py
  int64_t largest = 0;
  const Coding coding = weights.of[0].coding;
  if (coding == Coding::kInt4Tiles) return takes_tiles(weights, x);
  for (int i = 0; i < weights.count; ++i) {
    const PackedWeight& weight = weights.of[i];
    if (!weight.blocked() || weight.in_tiles()) return kError;
    const bool may_round = weight.block_rows == 1 || weight.block_rows % 128 == 0 || weight.block_rows >= weight.n;
    rounds = rounds && may_round && weight.nested_block == kRoundsX;
    largest = std::max(largest, weight.elements());
  }
  const int64_t elements = number_of_elements(x), width = elements < 0 ? -1 : size_of_last(x);
  if (width <= 0) return width < 0 ? kError : kNo;
  const int64_t rows = elements / width;
  if (rows <= PyLong_AsSsize_t(settings.few_rows)) return kYes;
  for (int i = 1; i < weights.count; ++i) {
    if (weights.of[i].coding != coding) return kError;
  }
  const Owned size(PyLong_FromSsize_t(largest));
  PyObject *const int8 = coding == Coding::kInt8 ? Py_True : Py_False, *const rounded = rounds ? Py_True : Py_False;
  const Owned most(size ? PyObject_CallFunctionObjArgs(settings.most_rows, x, int8, rounded, size.get(), nullptr)
                        : nullptr);
  return most ? answer(rows <= PyLong_AsSsize_t(most.get())) : kError;
}

}  // namespace fused_mlp
