#include "parts.h"

#include <map>
#include <utility>

#include "../global_state/modes.h"
#include "../global_state/settings.h"
#include "direct/call.h"

namespace fused_mlp {
namespace {

// True if the forward that a module itself holds is that of its class, bound to it, as `kernels.kernelize` leaves it in
// modules for which it finds no kernel; or, if `kernels`, a kernel's that is known to compute the same.
Answer is_own_forward(PyObject* own, PyObject* module, bool kernels) {
  const Owned held(bound_function(own, module));
  if (!held) return PyErr_Occurred() ? kError : kNo;
  PyObject* const kind = class_of(module);
  const Owned forward(PyObject_GetAttr(kind, names().forward));
  if (!forward) return kError;
  if (held.get() == forward.get() || !kernels) return answer(held.get() == forward.get());
  const Owned key(PyTuple_Pack(2, kind, held.get()));
  if (!key) return kError;
  const bool known = item(settings.kernels, key.get()) != nullptr;
  return PyErr_Occurred() ? kError : answer(known);
}

// Puts the weight and the bias of a plain module, whose class has both, or no bias, into a tuple. If it `may_lack` a
// weight, None replaces a missing one.
Answer read_parameters(PyObject* state, PyObject* weight_name, bool biased, PyObject* operands, Py_ssize_t weight_place,
                       Py_ssize_t bias_place, bool may_lack = false) {
  PyObject* parameters = item(state, names().parameters);
  if (parameters == nullptr || !PyDict_Check(parameters)) return PyErr_Occurred() ? kError : kNo;
  for (PyObject* name : {weight_name, names().bias}) {  // the module's own __dict__ precedes its parameters
    const bool hidden = (biased || name == weight_name) && item(state, name) != nullptr;
    if (hidden || PyErr_Occurred()) return PyErr_Occurred() ? kError : kNo;
  }
  PyObject* weight = item(parameters, weight_name);
  if (weight == nullptr) return PyErr_Occurred() ? kError : kNo;
  PyObject* bias = biased ? item(parameters, names().bias) : Py_None;
  if (bias == nullptr) return PyErr_Occurred() ? kError : kNo;
  const bool lacks = may_lack && weight == Py_None;
  if (!lacks && class_of(weight) != settings.parameter) return kNo;
  if (bias != Py_None && class_of(bias) != settings.parameter) return kNo;
  const Answer there = put(operands, weight_place, weight);
  return there == kYes ? put(operands, bias_place, bias) : there;
}

// Returns the dictionaries of a class and its bases, up to nn.Module, in which an attribute hides a child of its name.
// They are live views: creating them takes time, reading their size does not.
PyObject* dictionaries_of(PyObject* order) {
  Py_ssize_t count = 0;
  while (count < PyTuple_Size(order) && PyTuple_GetItem(order, count) != settings.module) ++count;
  Owned found(PyTuple_New(count));
  for (Py_ssize_t i = 0; found && i < count; ++i) {
    PyObject* attributes = PyObject_GetAttr(PyTuple_GetItem(order, i), names().state);
    if (attributes == nullptr || PyTuple_SetItem(found.get(), i, attributes) != 0) return nullptr;
  }
  return found.release();
}

// True if none of these dictionaries has any of these names.
Answer have_none(PyObject* dictionaries, Objects names) {
  for (Py_ssize_t i = 0, count = PyTuple_Size(dictionaries); i < count; ++i) {
    for (PyObject* name : names) {
      const int found = PySequence_Contains(PyTuple_GetItem(dictionaries, i), name);
      if (found != 0) return found < 0 ? kError : kNo;
    }
  }
  return kYes;
}

// True if a class has none of these attributes, which would hide children of the same names, and its attribute look-up
// is nn.Module's. Looking up a missing attribute costs an exception, so this is done once; later calls check the
// dictionaries of the class and its bases.
Answer hides_none(PyObject* kind, PyObject* wanted) {
  struct Known {
    PyObject *order, *dictionaries;  // the former also keeps the class, which lives as long as the process
  };
  static std::map<std::pair<PyObject*, PyObject*>, Known> known;
  const Owned order(PyObject_GetAttr(kind, names().order));
  if (!order) return kError;
  Few asked;
  for (Py_ssize_t i = 0, size = PyTuple_Size(wanted); i < size; ++i) {
    PyObject* const name = PyTuple_GetItem(wanted, i);
    if (PyUnicode_Check(name) && !asked.add(name)) return kNo;  // other objects are parts themselves, not children
  }
  const auto found = known.find({kind, wanted});
  if (found != known.end() && found->second.order == order.get()) {
    const Answer none = have_none(found->second.dictionaries, asked.all());
    return none == kYes ? have_none(found->second.dictionaries, names().finders) : none;
  }
  for (PyObject* name : names().finders) {
    const Owned usual(PyObject_GetAttr(settings.module, name));
    const Answer same = usual ? has_attribute(kind, name, usual.get()) : kError;
    if (same != kYes) return same;
  }
  for (PyObject* name : asked.all()) {
    const Owned hidden(PyObject_GetAttr(kind, name));
    if (hidden) return kNo;
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return kError;
    PyErr_Clear();
  }
  Owned dictionaries(dictionaries_of(order.get()));
  if (!dictionaries) return kError;
  if (found == known.end()) Py_INCREF(wanted);
  Py_INCREF(order.get());
  known[{kind, wanted}] = {order.get(), dictionaries.release()};
  return kYes;
}

// True if a part returns the hidden values unchanged: dropout that is inactive or has probability 0, nn.Identity, and
// a cast, whose dtypes fused() checks.
Answer passes(PyObject* part, bool recording) {
  if (PyFloat_Check(part)) return answer(PyFloat_AsDouble(part) == 0.0);
  if (is_cast(part)) return kYes;
  const bool identity = class_of(part) == settings.identity;
  if (!identity && class_of(part) != settings.dropout) return kNo;
  const Answer called = has_attribute(class_of(part), names().call, settings.call);
  if (called != kYes) return called;
  PyObject* state = state_of(part);
  if (state == nullptr) return kError;
  if (identity) return is_bare(part, state, recording);
  PyObject* training = item(state, names().training);
  PyObject* p = training == Py_False ? nullptr : item(state, names().probability);
  if (training != Py_False && (p == nullptr || !PyFloat_Check(p) || PyFloat_AsDouble(p) != 0.0)) {
    return PyErr_Occurred() ? kError : kNo;
  }
  return is_bare(part, state, recording);
}

// Returns the probability of an active dropout, borrowed, if it is neither 0 nor 1 and only torch's forward runs.
PyObject* active_dropout(PyObject* part, bool recording) {
  PyObject* const state = state_of(part);
  PyObject* const p = state == nullptr ? nullptr : item(state, names().probability);
  if (p == nullptr || !PyFloat_Check(p)) return nullptr;
  const double value = PyFloat_AsDouble(p);
  const bool plain = value > 0 && value < 1 && has_attribute(class_of(part), names().call, settings.call) == kYes &&
                     is_bare(part, state, recording) == kYes;
  return plain ? p : nullptr;
}

// True if an activation that holds its function, as two classes of transformers do, holds one that its class sets: a
// function of torch, with `approximate` "tanh" unless that is None, or a method. `held` are these three.
Answer holds_own(PyObject* act, PyObject* state, PyObject* held) {
  PyObject* const found = item(state, names().act);
  if (found == nullptr) return PyErr_Occurred() ? kError : kNo;
  PyObject *const function = PyTuple_GetItem(held, 0), *const approximate = PyTuple_GetItem(held, 1);
  if (found == function) return answer(approximate == Py_None);
  if (class_of(found) != settings.partial) {
    const Owned method(bound_function(found, act));
    return method || !PyErr_Occurred() ? answer(method.get() == PyTuple_GetItem(held, 2)) : kError;
  }
  const Answer same = has_attribute(found, names().partial_function, function);
  const Owned arguments(PyObject_GetAttr(found, names().arguments)), options(PyObject_GetAttr(found, names().keywords));
  if (same == kError || !arguments || !options) return kError;
  PyObject* const option = item(options.get(), names().approximate);
  const bool alone = option != nullptr && PyObject_Size(options.get()) == 1 && PyTuple_Size(arguments.get()) == 0;
  if (!alone || same == kNo || approximate == Py_None) return PyErr_Occurred() ? kError : kNo;
  return answer(PyUnicode_Check(option) && PyUnicode_CompareWithASCIIString(option, "tanh") == 0);
}

int64_t size_by_method(PyObject* tensor, PyObject* dimension) {
  const Owned size(PyObject_CallMethodObjArgs(tensor, names().size, dimension, nullptr));
  return size ? PyLong_AsSsize_t(size.get()) : -1;
}

// True if a norm that holds its normalised shape, as torch's do, has this many features, and as many weights and
// biases, if any.
Answer norms_last_dimension(PyObject* state, Py_ssize_t features, PyObject* weight, PyObject* bias) {
  PyObject* normalized = item(state, names().normalized);
  if (normalized == nullptr || !PyTuple_Check(normalized)) return PyErr_Occurred() ? kError : kNo;
  if (PyTuple_Size(normalized) != 1) return kNo;
  if (features != PyLong_AsSsize_t(PyTuple_GetItem(normalized, 0))) return PyErr_Occurred() ? kError : kNo;
  for (PyObject* each : {weight, bias}) {
    const int64_t size = each == Py_None ? features : size_of_first(each);
    if (size != features) return size < 0 ? kError : kNo;
  }
  return kYes;
}

}  // namespace

int64_t size_of_first(PyObject* tensor) {
  dlpack::Tensor view;
  return read_sizes(tensor, &view) ? view.sizes[0] : size_by_method(tensor, names().first);
}

int64_t size_of_last(PyObject* tensor) {
  dlpack::Tensor view;
  return read_sizes(tensor, &view) ? view.sizes[view.dims - 1] : size_by_method(tensor, names().last);
}

Answer hold(PyObject* guards, PyObject* kind, PyObject* state) {
  Answer said = are_unchanged(PyTuple_GetItem(guards, 0));
  if (said == kYes && state != nullptr) said = are_items(state, PyTuple_GetItem(guards, 1));
  PyObject* const hidden = PyTuple_GetItem(guards, 2);
  return said == kYes && kind != nullptr && PyTuple_Size(hidden) != 0 ? hides_none(kind, hidden) : said;
}

Answer are_items(PyObject* dictionary, PyObject* pairs) {
  for (Py_ssize_t i = 0, count = PyTuple_Size(pairs); i < count; ++i) {
    PyObject* pair = PyTuple_GetItem(pairs, i);
    const Py_ssize_t size = PyTuple_Size(pair);
    PyObject* name = size < 1 ? nullptr : PyTuple_GetItem(pair, 0);
    PyObject* found = name == nullptr ? nullptr : item(dictionary, name);
    if (PyErr_Occurred()) return kError;
    if (found != (size == 1 ? nullptr : PyTuple_GetItem(pair, 1))) return kNo;
  }
  return kYes;
}

Answer has_hooks(PyObject* state, bool recording) {
  for (PyObject* name : Objects(names().hooks).first(recording ? 4 : 2)) {
    PyObject* hooks = item(state, name);
    if (hooks == nullptr) return PyErr_Occurred() ? kError : kYes;
    const Py_ssize_t count = PyObject_Size(hooks);
    if (count != 0) return count < 0 ? kError : kYes;
  }
  for (PyObject* name : names().own_calls) {
    PyObject* const call = item(state, name);
    if (call != nullptr && call != Py_None) return kYes;
  }
  return PyErr_Occurred() ? kError : kNo;
}

PyObject* bound_function(PyObject* method, PyObject* module) {
  const bool bound = class_of(method) == settings.method && has_attribute(method, names().bound_to, module) == kYes;
  return bound ? PyObject_GetAttr(method, names().bound_function) : nullptr;
}

Answer is_bare(PyObject* module, PyObject* state, bool recording, bool kernels) {
  const Answer hooks = has_hooks(state, recording);
  if (hooks != kNo) return hooks == kYes ? kNo : kError;
  PyObject* const own = own_forward(module, state);
  if (own != nullptr) return is_own_forward(own, module, kernels);
  return PyErr_Occurred() ? kError : kYes;
}

PyObject* own_forward(PyObject* module, PyObject* state) {
  PyObject* const own = item(state, names().forward);
  if (own == nullptr || class_of(own) != settings.partial) return own;
  PyObject *const hook = item(state, names().device_hook), *const kept = item(state, names().kept_forward);
  if (hook == nullptr || kept == nullptr) return PyErr_Occurred() ? nullptr : own;
  PyObject* known = item(settings.device_hooks, class_of(hook));
  if (known == nullptr) {
    const Owned read(PyErr_Occurred() ? nullptr
                                      : PyObject_CallFunctionObjArgs(settings.known_hook, class_of(hook), nullptr));
    if (!read) return nullptr;
    known = read.get();  // the dictionary keeps it
  }
  if (known == Py_None) return own;
  const Owned function(PyObject_GetAttr(own, names().partial_function));
  const Owned arguments(PyObject_GetAttr(own, names().arguments));
  const Owned keywords(PyObject_GetAttr(own, names().keywords));
  if (!function || !arguments || !keywords) return nullptr;
  const bool calls_hook = PyTuple_Size(arguments.get()) == 1 && PyTuple_GetItem(arguments.get(), 0) == module &&
                          PyObject_Size(keywords.get()) == 0 &&
                          has_attribute(function.get(), names().function_code, PyTuple_GetItem(known, 1)) == kYes;
  PyObject* const state_of_hook = calls_hook ? state_of(hook) : nullptr;
  const bool plain = state_of_hook != nullptr && hold(PyTuple_GetItem(known, 0), nullptr, state_of_hook) == kYes;
  if (PyErr_Occurred()) return nullptr;
  return plain ? kept : own;
}

PyObject* state_of(PyObject* module) {
  const Owned state(PyObject_GenericGetAttr(module, names().state));
  if (state && !PyDict_Check(state.get())) {
    PyErr_SetString(PyExc_TypeError, "module must be a torch.nn.Module");
    return nullptr;
  }
  return state.get();
}

PyObject* held_weight(PyObject* layer) {
  const bool known = class_of(layer) == settings.linear || item(settings.linears, class_of(layer)) != nullptr;
  PyObject* const state = known ? state_of(layer) : nullptr;
  PyObject* const parameters = state == nullptr ? nullptr : item(state, names().parameters);
  PyObject* const weight =
      parameters == nullptr || !PyDict_Check(parameters) ? nullptr : item(parameters, names().weight);
  return weight != nullptr && class_of(weight) == settings.parameter ? weight : nullptr;
}

Answer read_linear(PyObject* layer, bool recording, PyObject* operands, Py_ssize_t weight_place,
                   Py_ssize_t bias_place) {
  PyObject* const other = class_of(layer) == settings.linear ? nullptr : item(settings.linears, class_of(layer));
  if (other == nullptr && class_of(layer) != settings.linear) return PyErr_Occurred() ? kError : kNo;
  PyObject* state = state_of(layer);
  if (state == nullptr) return kError;
  Answer read = is_bare(layer, state, recording);
  if (read == kYes) read = read_parameters(state, names().weight, true, operands, weight_place, bias_place);
  if (other == nullptr || read != kYes) return read;
  read = hold(PyTuple_GetItem(other, 0), class_of(layer), state);
  if (read != kYes) return read;
  if (PyTuple_GetItem(other, 1) == Py_False) return answer(PyTuple_GetItem(operands, bias_place) == Py_None);
  read = is_quiet();  // a trace would record what follows
  if (read != kYes) return read;
  const Owned weight(PyObject_CallMethodObjArgs(PyTuple_GetItem(operands, weight_place), names().transpose, nullptr));
  return weight ? put(operands, weight_place, weight.get()) : kError;
}

Answer read_adapted(PyObject* layer, bool recording, PyObject* dtype, PyObject* operands, Py_ssize_t weight_place,
                    Py_ssize_t bias_place, PyObject* adapters, Py_ssize_t place, bool* drops,
                    PackedWeights* quantised) {
  const auto read_base = [&](PyObject* base) {
    PyObject* known = item(settings.quantised, class_of(base));
    if (known == nullptr) {
      const Answer plain = read_linear(base, recording, operands, weight_place, bias_place);
      if (plain == kNo) known = known_by_weight(base);
      if (known == nullptr) return PyErr_Occurred() ? kError : plain;
    }
    return read_packed(base, known, recording, dtype, operands, weight_place, bias_place, quantised);
  };
  for (Py_ssize_t i = 0; i < kAdapterPlaces; ++i) {
    PyObject* const neutral = i == kScaling ? names().one : i == kDropout ? names().zero : Py_None;
    if (put(adapters, place + i, neutral) != kYes) return kError;
  }
  PyObject* const unchanged = item(settings.adapters, class_of(layer));
  if (unchanged == nullptr) {
    return PyErr_Occurred() ? kError : read_base(layer);
  }
  PyObject* const state = state_of(layer);
  if (state == nullptr) return kError;
  const Answer called = is_bare(layer, state, recording, true);
  if (called != kYes) return called;
  const Answer same = are_unchanged(unchanged);
  if (same != kYes) return same;
  const Names& n = names();
  const auto child = [&](PyObject* name) { return item(item(state, n.modules), name); };
  const auto holds = [&](PyObject* name) { return item(state, name) != nullptr; };
  if (!holds(n.modules) || !holds(n.disabled) || !holds(n.merged) || !holds(n.active) || !holds(n.scaling)) {
    return PyErr_Occurred() ? kError : kNo;
  }
  PyObject* const base = child(n.base_layer);
  if (base == nullptr) return PyErr_Occurred() ? kError : kNo;
  const Answer read = read_base(base);
  if (read != kYes) return read;
  const Py_ssize_t merged = PyObject_Size(item(state, n.merged));
  const bool disabled = item(state, n.disabled) != Py_False;
  if (merged < 0 || (disabled && merged > 0)) return merged < 0 ? kError : kNo;
  if (disabled || merged > 0) return kYes;

  PyObject* active = item(state, n.active);
  if (PyList_Check(active)) active = PyList_Size(active) == 1 ? PyList_GetItem(active, 0) : nullptr;
  if (active == nullptr || !PyUnicode_Check(active)) return PyErr_Occurred() ? kError : kNo;
  PyObject* of[3];  // lora_A, lora_B, lora_dropout
  for (int i = 0; i < 3; ++i) {
    PyObject* const container = child(n.of_adapters[i]);
    if (container == nullptr || class_of(container) != settings.module_dict) return PyErr_Occurred() ? kError : kNo;
    PyObject* const held = state_of(container);
    PyObject* const modules = held == nullptr ? nullptr : item(held, n.modules);
    of[i] = modules == nullptr ? nullptr : item(modules, active);
    if (PyErr_Occurred()) return kError;
  }
  if (of[0] == nullptr) return kYes;  // no adapter of this name
  PyObject* const enabled = item(state, n.casts_input);
  PyObject *const variants = item(state, n.variants), *const dora = item(state, n.use_dora);
  const bool varied = (variants != nullptr && (!PyDict_Check(variants) || item(variants, active) != nullptr)) ||
                      (dora != nullptr && (!PyDict_Check(dora) || item(dora, active) != Py_False));
  PyObject* const scaling = item(item(state, n.scaling), active);
  if (PyErr_Occurred()) return kError;
  const bool plain = of[1] != nullptr && of[2] != nullptr && class_of(of[0]) == settings.linear &&
                     class_of(of[1]) == settings.linear && (enabled == nullptr || enabled == Py_True) && !varied &&
                     scaling != nullptr && (PyFloat_CheckExact(scaling) || PyLong_Check(scaling));
  if (!plain) return kNo;
  Answer said = passes(of[2], recording);
  *drops = said == kNo && class_of(of[2]) == settings.dropout;
  if (*drops && settings.drops == Py_True) {
    PyObject* const p = active_dropout(of[2], recording);
    said = p == nullptr ? (PyErr_Occurred() ? kError : kNo) : put(adapters, place + kDropout, p);
  }
  if (said == kYes) said = read_linear(of[0], recording, adapters, place + kA, place + kBiasOfA);
  if (said == kYes) said = read_linear(of[1], recording, adapters, place + kB, place + kBiasOfB);
  if (said != kYes) return said;
  const bool biased =
      PyTuple_GetItem(adapters, place + kBiasOfA) != Py_None || PyTuple_GetItem(adapters, place + kBiasOfB) != Py_None;
  return biased ? kNo : put(adapters, place + kScaling, scaling);
}

bool is_cast(PyObject* part) { return class_of(part) == settings.function; }

Answer all_pass(Objects parts, bool recording) {
  for (PyObject* part : parts) {
    const Answer said = passes(part, recording);
    if (said != kYes) return said;
  }
  return kYes;
}

PyObject* known_activation(PyObject* act, bool recording) {
  PyObject* const kind = class_of(act);
  if (kind == settings.function || kind == settings.builtin) {
    PyObject* const function = item(settings.known, act);
    return function != nullptr && hold(PyTuple_GetItem(function, 0), nullptr, nullptr) == kYes ? function : nullptr;
  }
  const bool gelu = kind == settings.gelu;
  PyObject* known = gelu ? nullptr : item(settings.known, kind);
  if (known == nullptr && !gelu) return nullptr;
  PyObject* state = state_of(act);
  if (state == nullptr) return nullptr;
  if (gelu) {
    PyObject* approximate = item(state, names().approximate);
    known = approximate == nullptr ? nullptr : item(settings.known, approximate);
    if (known == nullptr) return nullptr;
  }
  const bool plain =
      is_bare(act, state, recording, true) == kYes && hold(PyTuple_GetItem(known, 0), kind, state) == kYes;
  PyObject* const held = PyTuple_GetItem(known, 2);
  return plain && (held == Py_None || holds_own(act, state, held) == kYes) ? known : nullptr;
}

Answer read_norm(PyObject* norm, Py_ssize_t features, PyObject* dtype, bool recording, PyObject* operands,
                 Py_ssize_t place) {
  PyObject* const state = item(settings.norms, class_of(norm)) == nullptr ? nullptr : state_of(norm);
  if (state == nullptr) return PyErr_Occurred() ? kError : kNo;
  const Answer bare = is_bare(norm, state, recording, true);
  return bare == kYes ? read_running_norm(norm, features, dtype, operands, place) : bare;
}

Answer read_running_norm(PyObject* norm, Py_ssize_t features, PyObject* dtype, PyObject* operands, Py_ssize_t place) {
  PyObject* known = item(settings.norms, class_of(norm));
  PyObject* state = known == nullptr ? nullptr : state_of(norm);
  if (state == nullptr) return PyErr_Occurred() ? kError : kNo;
  const bool of_torch = PyTuple_GetItem(known, 3) != Py_False, biased = PyTuple_GetItem(known, 4) != Py_False;
  Answer said = read_parameters(state, PyTuple_GetItem(known, 5), biased, operands, place, place + 1, of_torch);
  if (said == kYes) said = hold(PyTuple_GetItem(known, 0), class_of(norm), state);
  PyObject* weight = PyTuple_GetItem(operands, place);
  if (said == kYes && of_torch) {
    said = norms_last_dimension(state, features, weight, PyTuple_GetItem(operands, place + 1));
  }
  if (said != kYes) return said;
  PyObject* const named = PyTuple_GetItem(known, 2);
  PyObject* const eps = named == Py_None ? names().zero : item(state, named);
  if (eps == nullptr || !PyFloat_Check(eps)) return PyErr_Occurred() ? kError : kNo;
  if (put(operands, place + 2, eps) != kYes || put(operands, place + 3, PyTuple_GetItem(known, 1)) != kYes) {
    return kError;
  }
  const Answer alike = weight == Py_None ? kYes : has_attribute(weight, names().dtype, dtype);
  const bool may_be_wide = alike == kNo && PyTuple_GetItem(known, 7) != Py_False;
  return may_be_wide ? has_attribute(weight, names().dtype, settings.float32) : alike;
}

PyObject* norm_behind(Objects parts, bool recording, PyObject** dropped) {
  PyObject* norm = Py_None;
  for (PyObject* part : parts) {
    if (norm == Py_None && item(settings.norms, class_of(part)) != nullptr) {
      norm = part;
      continue;
    }
    const Answer said = PyErr_Occurred() ? kError : passes(part, recording);
    if (said == kYes) continue;
    if (said == kError || *dropped != nullptr || class_of(part) != settings.dropout) return nullptr;
    *dropped = active_dropout(part, recording);
    if (*dropped == nullptr) return nullptr;
  }
  return *dropped != nullptr && norm != Py_None ? nullptr : norm;
}

Answer Owner::open(PyObject* module, PyObject* state, PyObject* names) {
  state_ = state;
  modules_ = item(state, fused_mlp::names().modules);
  if (modules_ == nullptr || !PyDict_Check(modules_)) return PyErr_Occurred() ? kError : kNo;
  return hides_none(class_of(module), names);
}

PyObject* Owner::part(PyObject* given) const {
  if (operands_ != nullptr && PyLong_Check(given)) return PyTuple_GetItem(operands_, PyLong_AsSsize_t(given));
  if (modules_ == nullptr || !PyUnicode_Check(given)) return given;
  PyObject* found = item(state_, given);  // for example a function, which precedes children in Python's look-up
  if (found == nullptr && !PyErr_Occurred()) found = item(modules_, given);
  return found != Py_None ? found : nullptr;
}

bool Owner::is_in_eval() const { return state_ != nullptr && item(state_, fused_mlp::names().training) == Py_False; }

bool Owner::add_all(PyObject* given, Few* found) const {
  for (Py_ssize_t i = 0, count = PyTuple_Size(given); i < count; ++i) {
    PyObject* const found_part = part(PyTuple_GetItem(given, i));
    if (found_part == nullptr || !found->add(found_part)) return false;
  }
  return true;
}

Answer read_children(PyObject* module, PyObject* state, PyObject* names, Few* found) {
  Owner owner;
  const Answer opened = owner.open(module, state, names);
  return opened == kYes ? answer(owner.add_all(names, found)) : opened;
}

}  // namespace fused_mlp
