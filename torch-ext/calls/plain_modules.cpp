#include "plain_modules.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <utility>

#include "../global_state/modes.h"
#include "../global_state/settings.h"
#include "direct/call.h"
#include "mixtures/conditions.h"
#include "mixtures/plain_mixture.h"
#include "plain_mlp.h"
#include "saving.h"

namespace fused_mlp {
namespace {

// Parts of a segment (models/running/split_mlps.py).
constexpr Py_ssize_t kNames = 1, kBeforeNorm = 6, kGuards = 7, kCountBehind = 8;

// Returns this part of the segment that calling a module runs, if it runs nothing else: borrowed; nullptr if that is
// unknown, or if the part is None.
PyObject* running(PyObject* module, PyObject* state, PyObject* segments, bool recording, Py_ssize_t part = kNames) {
  PyObject* const kind = class_of(module);
  PyObject* const own = own_forward(module, state);
  const Owned forward(own == nullptr ? PyObject_GetAttr(kind, names().forward) : bound_function(own, module));
  PyObject* const segment = forward ? item(segments, forward.get()) : nullptr;
  if (segment == nullptr || PyTuple_GetItem(segment, part) == Py_None) return nullptr;
  PyObject *const written = PyTuple_GetItem(segment, 0), *const mark = item(state, settings.mark);
  const bool fused = forward.get() != written;
  if (fused && (mark == nullptr || !PyDict_Check(mark))) return nullptr;  // restored
  // A method in the module's own __dict__, from which the fused one was made, hides the class's.
  const bool held = fused && item(mark, names().forward) == Py_True;
  const bool plain = has_attribute(kind, names().call, settings.call) == kYes &&
                     (held || has_attribute(kind, names().forward, written) == kYes) &&
                     hold(PyTuple_GetItem(segment, kGuards), kind, state) == kYes && has_hooks(state, recording) == kNo;
  return plain ? segment : nullptr;
}

// The MLP, or its first module, whose block was too small and last not fused in this thread; its own method can skip
// the same checks. Only the address is kept, and the outcome is right for any module. On a CPU the checks run: torch's
// functions, called separately, are faster than its modules.
thread_local PyObject* left_last = nullptr;

// An activation of several operations is computed as one by the MLP's method.
void note_left(PyObject* module, PyObject* act) {
  if (PyObject_Size(settings.least_work) > 0 && is_composite(act) == kNo) left_last = module;
}

// Calls that were too small, by the addresses of their modules and of an object that says what of them was asked. Later
// calls on no more elements skip the checks that said so, which touch so much code and data that they take 7 us in a
// model. Like the outcome above, this is right for any module. As a module may have changed, or another one may be at
// its address, the checks run again now and then; fusing any module forgets all calls.
struct LeftCall {
  PyObject *module, *asked, *noted;
  int64_t elements;
  int uses;
  bool in_eval;
};
constexpr int kLeftCalls = 1024, kUses = 64;
LeftCall left_calls[kLeftCalls];

LeftCall& place_of(PyObject* module, PyObject* asked) {
  const auto address = reinterpret_cast<uintptr_t>(module) + 3 * reinterpret_cast<uintptr_t>(asked);
  return left_calls[(address >> 4 ^ address >> 14) % kLeftCalls];
}

// True if a call of x was left before, and would be checked as one that autograd records.
bool was_left(PyObject* module, PyObject* asked, PyObject* x) {
  LeftCall& call = place_of(module, asked);
  if (call.module != module || call.asked != asked || call.uses == 0) return false;
  if (class_of(x) != settings.tensor || PyObject_Size(settings.blocks) != 1) return false;
  PyObject* const state = state_of(module);
  if (state == nullptr || item(state, names().training) != (call.in_eval ? Py_False : Py_True)) return false;
  const bool recording = aoti_torch_grad_mode_is_enabled();
  if (recording ? attribute_is_true(x, names().requires_grad) != kYes
                : call.in_eval || said_by(settings.is_inference) != kNo) {
    return false;
  }
  const int64_t elements = number_of_elements(x);
  if (elements < 0 || elements > call.elements) return false;
  --call.uses;
  if (call.noted != nullptr) left_last = call.noted;
  return true;
}

// Remembers a call that was left, and the MLP that it has noted as left.
void remember_left(PyObject* module, PyObject* asked, PyObject* x) {
  PyObject* const state = state_of(module);
  const int64_t elements = state == nullptr ? -1 : number_of_elements(x);
  if (elements < 0) return;
  const bool in_eval = item(state, names().training) == Py_False;
  place_of(module, asked) = {module, asked, left_last, elements, kUses, in_eval};
}

PyObject* py_forget_left(PyObject*, PyObject*) {
  std::fill(std::begin(left_calls), std::end(left_calls), LeftCall{});
  Py_RETURN_NONE;
}

// True if autograd records everything computed from x. That holds for most calls in training, whose ops Python records;
// checking it first saves all other checks.
Answer is_followed(PyObject* x, Answer recording) {
  if (recording != kYes || class_of(x) != settings.tensor) return recording == kError ? kError : kNo;
  return is_as_recorded() ? kYes : attribute_is_true(x, names().requires_grad);
}

// `rest` are the arguments of the second module after its first one.
PyObject* split_mlp(PyObject* firsts, PyObject* seconds, PyObject* owner, PyObject* names_of_both, PyObject* x,
                    PyObject* rest) {
  const Answer asked = is_recording(), followed = is_followed(x, asked);
  if (followed == kError || (followed == kYes && PyTuple_Size(rest) > 1)) return nullptr;
  const bool recording = asked == kYes;
  PyObject* state = state_of(owner);
  Few both, starts, ends;
  if (state == nullptr || read_children(owner, state, names_of_both, &both) != kYes) return nullptr;
  PyObject *const second = both.all()[0], *const first = both.all()[1];
  PyObject* second_state = state_of(second);
  PyObject* first_state = second_state == nullptr ? nullptr : state_of(first);
  PyObject* start = first_state == nullptr ? nullptr : running(first, first_state, firsts, recording);
  PyObject* last = start == nullptr ? nullptr : running(second, second_state, seconds, recording);
  if (last == nullptr) return nullptr;
  PyObject* of_first = PyTuple_GetItem(start, kNames);
  if (read_children(first, first_state, PyTuple_GetItem(of_first, 1), &starts) != kYes ||
      read_children(second, second_state, PyTuple_GetItem(last, 1), &ends) != kYes) {
    return nullptr;
  }
  // The first module provides its activation and projections, the second its projection, the parts that pass values on,
  // and its norm.
  PyObject* ending = PyTuple_GetItem(last, 2);
  const bool normed = PyObject_IsTrue(ending) == 1;
  const Objects parts = ends.all(), passing = parts.subspan(1, parts.size() - 1 - normed);
  const size_t in_front = passing.size() - PyLong_AsSsize_t(PyTuple_GetItem(last, kCountBehind));
  Few& given = starts;
  if (!given.add(parts[0])) return nullptr;
  const bool in_eval = item(state, names().training) == Py_False;
  Mlp mlp{PyTuple_GetItem(of_first, 0), x, given.all().subspan(1), given.all()[0], passing.first(in_front), in_eval};
  const bool sums = ending != Py_None && PyTuple_Size(rest) == 1;
  if (PyObject* const dtype = normed && !sums ? nullptr : dtype_followed(x)) {
    PyObject* const residual = sums ? PyTuple_GetItem(rest, 0) : Py_None;
    const Answer left =
        is_left(mlp, dtype, {Py_None, Py_None, {}, names().one, residual, normed ? parts.back() : Py_None});
    if (left == kYes) {
      note_left(first, mlp.act);
      remember_left(owner, names_of_both, x);
      return PyBool_FromLong(false);
    }
    if (left == kError && !is_answer()) return nullptr;
  }
  if (PyErr_Occurred()) return nullptr;
  if (followed == kYes && !normed) return nullptr;
  if (sums) {
    const Block block{Py_None,
                      Py_None,
                      passing.subspan(in_front),
                      names().one,
                      PyTuple_GetItem(rest, 0),
                      normed ? parts.back() : Py_None};
    Owned whole(fused(mlp, recording, &block));
    if (!whole && !is_answer()) return nullptr;
    const bool recorded = whole && PyTuple_Check(whole.get()) && PyTuple_Size(whole.get()) == 3;
    if (whole.get() == Py_False && was_hooked()) left_last = first;
    if (recorded || whole.get() == Py_False || (whole && class_of(whole.get()) == settings.tensor))
      return whole.release();  // or as below
  }
  if (followed == kYes) return nullptr;
  mlp.between = passing;
  const Owned result(fused(mlp, recording));
  if (!result || class_of(result.get()) != settings.tensor) return nullptr;  // or operands: the op is not called here
  return PyTuple_Pack(3, result.get(), last, second);
}

// The places of an MLP among modules run in sequence, if they are exactly one (models/running/sequences.py). If `act`
// is negative, the first module hands over its activation.
struct Place {
  Py_ssize_t act, second;
};

Answer read_place(Objects parts, PyObject* places, Place* found) {
  const Owned kinds(PyTuple_New(parts.size()));
  for (size_t i = 0; kinds && i < parts.size(); ++i) {
    if (put(kinds.get(), i, class_of(parts[i])) != kYes) return kError;
  }
  PyObject* const all = kinds ? item(places, kinds.get()) : nullptr;
  if (all == nullptr || PyTuple_Size(all) != 1) return PyErr_Occurred() ? kError : kNo;
  PyObject* const place = PyTuple_GetItem(all, 0);  // of first, act, second
  PyObject *const act = PyTuple_GetItem(place, 1), *const second = PyTuple_GetItem(place, 2);
  if (second == Py_None) return kNo;
  *found = {act == Py_None ? -1 : PyLong_AsSsize_t(act), PyLong_AsSsize_t(second)};
  return answer(PyLong_AsSsize_t(PyTuple_GetItem(place, 0)) == 0);
}

// Returns use(mlp, rest) for the MLP that the modules of an nn.ModuleList form if run in sequence, and the modules
// after it; nullptr without an error if they form none. `places` maps the modules' classes to the places of MLPs among
// them (models/running/sequences.py); `plain` is the pattern of an ungated MLP.
template <typename Use>
PyObject* in_turn(PyObject* list, PyObject* places, PyObject* firsts, PyObject* plain, PyObject* x, bool recording,
                  const Use& use) {
  if (class_of(list) != settings.module_list) return nullptr;
  PyObject* const state = state_of(list);
  PyObject* const children = state == nullptr ? nullptr : item(state, names().modules);
  if (children == nullptr || !PyDict_Check(children)) return nullptr;
  Few parts, projections;
  PyObject *name, *child;
  for (Py_ssize_t at = 0; PyDict_Next(children, &at, &name, &child);) {
    if (!parts.add(child)) return nullptr;
  }
  Place place;
  if (read_place(parts.all(), places, &place) != kYes) return nullptr;
  const Objects all = parts.all(), rest = all.subspan(place.second + 1);
  if (place.act >= 0) {
    projections.add(all[0]);
    projections.add(all[place.second]);
    const Objects between = all.subspan(place.act + 1, place.second - place.act - 1);
    return use(Mlp{plain, x, projections.all(), all[place.act], between}, rest);
  }
  // These checks come first: a first module must not be observed handing over its parts.
  if (dtype_taken(x) == nullptr || is_undisturbed() != kYes) return nullptr;
  PyObject* const first_state = state_of(all[0]);
  PyObject* const segment =
      first_state == nullptr ? nullptr : running(all[0], first_state, firsts, recording, kBeforeNorm);
  if (segment == nullptr) return nullptr;
  const Owned handed(PyObject_CallFunctionObjArgs(PyTuple_GetItem(segment, kBeforeNorm), all[0], x, nullptr));
  if (!handed || !PyTuple_Check(handed.get())) return nullptr;
  PyObject* const first = PyTuple_GetItem(handed.get(), 2);  // after the pattern of the whole MLP and x
  for (Py_ssize_t i = 0; i < PyTuple_Size(first); ++i) projections.add(PyTuple_GetItem(first, i));
  projections.add(all[place.second]);
  const Owned act(PyObject_CallFunctionObjArgs(settings.known_by, PyTuple_GetItem(handed.get(), 3), nullptr));
  if (!act) return nullptr;
  const Objects between = all.subspan(1, place.second - 1);
  return use(Mlp{PyTuple_GetItem(handed.get(), 0), x, projections.all(), act.get(), between}, rest);
}

// Computes the block of an MLP whose last projection is followed by these parts, and then by the block's own.
PyObject* fused_before(Objects parts, const Mlp& mlp, bool recording, const Block& block) {
  Few behind;
  for (Objects each : {parts, block.behind}) {
    for (PyObject* part : each) {
      if (!behind.add(part)) return nullptr;
    }
  }
  const Block whole{block.first,    block.modulation, behind.all(), block.factor,
                    block.residual, block.last,       block.wide,   block.modulation_wide};
  return fused(mlp, recording, &whole);
}

// Computes the block of a module that runs a list of modules in sequence. After None, `turns` has the name of the list
// and the arguments of in_turn().
PyObject* block_in_turn(PyObject* turns, PyObject* state, PyObject* x, bool recording, const Block& block) {
  PyObject* const modules = item(state, names().modules);
  const bool there = modules != nullptr && PyDict_Check(modules);
  PyObject* const list = there ? item(modules, PyTuple_GetItem(turns, 1)) : nullptr;
  if (list == nullptr) return nullptr;
  const auto use = [&](const Mlp& mlp, Objects rest) -> PyObject* { return fused_before(rest, mlp, recording, block); };
  PyObject *const places = PyTuple_GetItem(turns, 2), *const firsts = PyTuple_GetItem(turns, 3);
  return in_turn(list, places, firsts, PyTuple_GetItem(turns, 4), x, recording, use);
}

PyObject* block_of(PyObject* wholes, PyObject* module, PyObject* x, bool recording, const Block& block) {
  PyObject* state = state_of(module);
  PyObject* segment = state == nullptr ? nullptr : running(module, state, wholes, recording);
  if (segment == nullptr) return nullptr;
  PyObject* names = PyTuple_GetItem(segment, kNames);
  if (PyDict_Check(PyTuple_GetItem(names, 0))) {
    return mixture(PyTuple_GetItem(names, 0), module, x, recording, Py_None, &block);
  }
  if (PyTuple_GetItem(names, 0) == Py_None) return block_in_turn(names, state, x, recording, block);
  const bool drops = PyTuple_GetItem(names, 3) != Py_False;
  if (drops && item(state, fused_mlp::names().training) != Py_False) return nullptr;
  Few found;
  if (read_children(module, state, PyTuple_GetItem(names, 1), &found) != kYes) return nullptr;
  const Objects parts = found.all();
  const size_t layers = PyLong_AsSsize_t(PyTuple_GetItem(names, 2));
  const Objects passing = parts.subspan(1 + layers);
  const size_t in_front = passing.size() - PyLong_AsSsize_t(PyTuple_GetItem(segment, kCountBehind));
  const bool in_eval = item(state, fused_mlp::names().training) == Py_False;
  const Mlp mlp{PyTuple_GetItem(names, 0), x, parts.subspan(1, layers), parts[0], passing.first(in_front), in_eval};
  return fused_before(passing.subspan(in_front), mlp, recording, block);
}

// Reads the arguments of a function, each of the kind that a letter names: a dict, a tuple or any object. It runs less
// code than PyArg_ParseTuple. The error is a ValueError, because is_answer() clears a TypeError.
template <size_t kEnd>
bool unpack(PyObject* given, const char (&kinds)[kEnd], PyObject* (&arguments)[kEnd - 1]) {
  bool fits = PyTuple_Size(given) == kEnd - 1;
  for (size_t i = 0; fits && i < kEnd - 1; ++i) {
    PyObject* const argument = arguments[i] = PyTuple_GetItem(given, i);
    fits = kinds[i] == 'o' || (kinds[i] == 'd' ? PyDict_Check(argument) : PyTuple_Check(argument));
  }
  if (!fits) PyErr_Format(PyExc_ValueError, "arguments must have the kinds %s, got %R", kinds, given);
  return fits;
}

PyObject* py_configure(PyObject*, PyObject* given) {
  if (!configure(given)) return nullptr;
  Py_RETURN_NONE;
}

Answer py_is_bare(PyObject* module) {
  PyObject* state = state_of(module);
  return state == nullptr ? kError : is_bare(module, state, true);
}

Answer py_is_undisturbed(PyObject*) {
  const PastModes modes;
  if (modes.said() != kYes) return modes.said();
  const Answer casts = is_autocasting();
  return casts == kNo ? is_undisturbed() : casts == kYes ? kNo : kError;
}

Answer py_are_items(PyObject* given) {
  PyObject* of[2];
  return unpack(given, "dt", of) ? are_items(of[0], of[1]) : kError;
}

PyObject* py_is_recorded(PyObject* operands) {
  const Py_ssize_t count = PyTuple_Check(operands) ? PyTuple_Size(operands) : 0;
  if (count < 1) return PyErr_Format(PyExc_ValueError, "operands must be a tuple with an input, got %R", operands);
  const PastModes modes;
  if (modes.said() != kYes) return nullptr;
  bool plain = dtype_taken(PyTuple_GetItem(operands, 0)) != nullptr && is_undisturbed() == kYes;
  for (Py_ssize_t i = 1; plain && i < count; ++i) {
    PyObject* operand = PyTuple_GetItem(operands, i);
    plain = operand == Py_None || is_tensor(operand);
  }
  const Owned cast_to(plain ? autocast_dtype() : nullptr);
  plain = plain && !PyErr_Occurred() && (!cast_to || are_of(operands, cast_to.get()) == kYes);
  if (!plain) return nullptr;
  const Answer recording = is_recording(), recorded = recording == kYes ? needs_gradient(operands) : recording;
  return recorded == kError ? nullptr : PyBool_FromLong(recorded);
}

PyObject* py_directly(PyObject* given) {
  PyObject* of[2];
  if (!unpack(given, "ot", of)) return nullptr;
  const Py_ssize_t size = PyTuple_Size(of[1]);
  const bool block = size % 2 != 0;
  const Py_ssize_t weights = (size - (block ? kBlockOperands : 0)) / 2 - 1;
  if (weights < 1 || weights > 3) {
    return PyErr_Format(PyExc_ValueError, "operands must be those of an op, got %R", of[1]);
  }
  const PastModes modes;
  if (modes.said() != kYes) return nullptr;
  return call_directly({weights, of[0] == Py_True, false, false, block}, of[1]);
}

// True if a module has an activation of several torch operations, so that running its parts takes long.
Answer has_composite(PyObject* state) {
  PyObject *const modules = item(state, names().modules), *name, *child;
  if (modules == nullptr || !PyDict_Check(modules)) return PyErr_Occurred() ? kError : kNo;
  for (Py_ssize_t place = 0; PyDict_Next(modules, &place, &name, &child);) {
    if (item(settings.adapters, class_of(child)) != nullptr) return kYes;
    const Answer found = is_composite(child);
    if (found != kNo) return found;
  }
  return kNo;
}

// True if the first parameter of a module needs a gradient; without one, the first found in its children, down to this
// many generations. kError without an error if there is none.
Answer is_trained(PyObject* state, int generations) {
  PyObject *const parameters = item(state, names().parameters), *const modules = item(state, names().modules);
  PyObject *name, *found;
  if (parameters == nullptr || modules == nullptr || !PyDict_Check(parameters) || !PyDict_Check(modules)) return kError;
  for (Py_ssize_t place = 0; PyDict_Next(parameters, &place, &name, &found);) {
    if (is_tensor(found)) return attribute_is_true(found, names().requires_grad);
  }
  for (Py_ssize_t place = 0; generations > 0 && PyDict_Next(modules, &place, &name, &found);) {
    PyObject* const of_child = found == Py_None ? nullptr : state_of(found);
    const Answer trained = of_child == nullptr ? kError : is_trained(of_child, generations - 1);
    if (trained != kError || PyErr_Occurred()) return trained;
  }
  return kError;
}

// Returns the child of a module under a name, of any type; nullptr, without necessarily an error, if there is none.
PyObject* child_of(PyObject* module, PyObject* name) {
  PyObject* const state = PyUnicode_Check(name) ? state_of(module) : nullptr;
  PyObject* const modules = state == nullptr ? nullptr : item(state, names().modules);
  return modules == nullptr || !PyDict_Check(modules) ? nullptr : item(modules, name);
}

// True if an MLP under autograd or autocast is too small in a dtype. If its first weight is unknown, it is assumed to
// have four times as many hidden features as inputs.
Answer does_little(PyObject* x, PyObject* dtype, PyObject* weight, bool gated, bool in_eval) {
  constexpr int64_t kWider = 4;
  const int64_t elements = number_of_elements(x), width = size_of_last(x);
  const int64_t of_weight = weight == nullptr ? 0 : number_of_elements(weight);
  if (elements < 0 || width < 0 || of_weight < 0) return kError;
  if (width == 0) return kYes;
  const int64_t hidden = weight == nullptr ? kWider * elements : elements / width * (of_weight / width);
  PyObject* const of_dtype = item(settings.least_recorded, dtype);
  PyObject* const least = of_dtype == nullptr ? nullptr : item(of_dtype, gated ? names().gated_mlp : names().mlp);
  if (least != nullptr) return answer(hidden < PyLong_AsSsize_t(least));
  return is_little_work(gated, in_eval, hidden * width);
}

// Computes py_runs_as_written(), inside torch's modes.
Answer runs_as_written(PyObject* x, PyObject* module, bool gated, PyObject* first) {
  PyObject* const state = state_of(module);
  if (state == nullptr) return kError;
  PyObject* const projection = first == nullptr ? nullptr : child_of(module, first);
  PyObject* const weight = projection == nullptr ? nullptr : held_weight(projection);
  PyObject* const training = item(state, names().training);
  const Answer composite = has_composite(state);
  if (composite == kError) return kError;
  PyObject* const quick = composite == kNo ? dtype_followed(x) : nullptr;
  if (quick != nullptr) {
    const Answer little = does_little(x, quick, weight, gated, training == Py_False);
    const Answer casting = little == kNo ? is_autocasting() : little;
    if (little == kYes) remember_left(module, Py_None, x);
    if (little == kNo && casting == kNo && is_as_recorded()) return said_by(settings.is_transformed);  // as below
    if (casting == kNo || little != kNo) return little;
  }
  if (PyErr_Occurred()) return kError;
  const Answer transformed = said_by(settings.is_transformed);  // the parts are torch's then
  if (transformed != kNo) return transformed;
  const Answer recording = is_recording();
  const Answer casting = recording == kError || PyErr_Occurred() ? kError : is_autocasting();
  if (casting == kError) return kError;
  if (recording != kYes && casting != kYes) return kNo;
  PyObject* const dtype = dtype_taken(x);
  if (dtype == nullptr) return PyErr_Occurred() ? kError : kNo;
  const Owned cast_to(casting == kYes ? autocast_dtype() : nullptr);
  const bool cast = cast_to && cast_to.get() != dtype;
  Answer followed = PyErr_Occurred() ? kError : is_followed(x, recording);
  if (followed == kNo && recording == kYes) followed = is_trained(state, 2);
  if (PyErr_Occurred()) return kError;
  if (!cast && followed != kYes) return kNo;
  const Answer quiet = is_quiet();  // under tracing no more checks run, because reads of sizes are recorded too
  if (quiet != kYes) return quiet;
  if (composite == kYes) return kNo;
  if (followed != kYes && !gated) return kYes;  // all of it is torch's: products that cast, and an activation
  const bool in_eval = followed != kYes || training == Py_False;
  // If autocast casts, a call under autograd is first judged as above, by its own dtype.
  const Answer little = followed == kYes || !cast ? does_little(x, dtype, weight, gated, in_eval) : kNo;
  return cast && little == kNo ? does_little(x, cast_to.get(), weight, gated, in_eval) : little;
}

Answer py_runs_as_written(PyObject* given) {
  PyObject* of[3];
  if (!unpack(given, "ooo", of)) return kError;
  if (std::exchange(left_last, nullptr) == of[1] || was_left(of[1], Py_None, of[0])) return kYes;
  if (PyErr_Occurred()) return is_answer() ? kNo : kError;
  const PastModes modes;
  if (modes.said() != kYes) return modes.said() == kError && !is_answer() ? kError : kNo;
  const AsRecorded as_recorded(state_of(of[1]));
  if (PyErr_Occurred()) return is_answer() ? kNo : kError;
  PyObject* const first = PyUnicode_Check(of[2]) ? of[2] : nullptr;
  const bool gated = first != nullptr || of[2] == Py_True;
  const Answer left = runs_as_written(of[0], of[1], gated, first);
  return left == kError && is_answer() ? kNo : left;
}

// The fields of a plan (models/running/plans.py).
enum Field : Py_ssize_t {
  kPattern,
  kProjections,
  kAct,
  kBetween,
  kModule,
  kBehind,
  kFirst,
  kLast,
  kWide,
  kModulationWide
};

PyObject* field(PyObject* plan, Field which) { return PyTuple_GetItem(plan, which); }

// Opens the parts of a plan: children of the module found by name, and operands of the call.
Answer open(Owner* owner, PyObject* plan, PyObject* module, PyObject* operands) {
  owner->give(operands);
  PyObject* const parts = PyTuple_GetItem(plan, kModulationWide + 1);
  if (parts == nullptr || !PyTuple_Check(parts)) return kError;
  if (PyTuple_Size(parts) == 0) return kYes;
  PyObject* const state = state_of(module);
  return state == nullptr ? kError : owner->open(module, state, parts);
}

// Returns the activation of a plan; one that is an operand may be spelled out, or be a method.
Owned activation_of(const Owner& owner, PyObject* plan) {
  PyObject* const act = owner.part(field(plan, kAct));
  if (act != nullptr && PyLong_Check(field(plan, kAct)) && class_of(act) != settings.function) {
    return Owned(PyObject_CallFunctionObjArgs(settings.known_by, act, nullptr));
  }
  Py_XINCREF(act);
  return Owned(act);
}

// Returns the __dict__ of a module, or if that is None, of the first module among the operands; nullptr, without
// necessarily an error, if there is none.
PyObject* state_of_first(PyObject* module, PyObject* operands) {
  for (Py_ssize_t i = 0; module == Py_None && i < PyTuple_Size(operands); ++i) {
    PyObject* const operand = PyTuple_GetItem(operands, i);
    if (PyType_IsSubtype(Py_TYPE(operand), reinterpret_cast<PyTypeObject*>(settings.module))) module = operand;
  }
  return module == Py_None ? nullptr : state_of(module);
}

PyObject* py_fused(PyObject* given) {
  PyObject* of[4];  // plan, module, x, operands
  if (!unpack(given, "toot", of)) return nullptr;
  const PastModes modes;
  if (modes.said() != kYes) return nullptr;
  const AsRecorded as_recorded(state_of_first(of[1], of[3]));
  if (PyErr_Occurred()) return nullptr;
  const Answer other = is_of_other_dtype(of[2]);
  if (other != kNo) return other == kYes ? PyBool_FromLong(false) : nullptr;  // Python would find the same
  PyObject* const plan = of[0];
  Owner owner;
  Few projections, between;
  const Answer recording = is_recording();
  if (recording == kError || open(&owner, plan, of[1], of[3]) != kYes) return nullptr;
  const Owned act = activation_of(owner, plan);
  const bool known =
      act && owner.add_all(field(plan, kProjections), &projections) && owner.add_all(field(plan, kBetween), &between);
  const Mlp mlp{field(plan, kPattern), of[2], projections.all(), act.get(), between.all(), owner.is_in_eval(), true};
  return known ? fused(mlp, recording == kYes) : nullptr;
}

// The result of a layer with an adapter, followed by an activation.
PyObject* py_adapted(PyObject* given) {
  PyObject* of[4];  // pattern, layer, x, activation
  if (!unpack(given, "oooo", of)) return nullptr;
  const PastModes modes;
  if (modes.said() != kYes) return nullptr;
  const Answer recording = is_recording();
  const Mlp mlp{of[0], of[2], Objects(&of[1], 1), of[3], {}, false, true};
  return recording == kError ? nullptr : fused(mlp, recording == kYes, nullptr, true);
}

// True if a norm in eval mode is recorded by autograd and has so few values that its own code is faster.
Answer is_little_in_eval(PyObject* state, PyObject* x) {
  if (PyObject_Size(settings.least_norm) == 0 || item(state, names().training) != Py_False) return kNo;
  PyObject* const dtype = dtype_followed(x);
  PyObject* const least = dtype == nullptr ? nullptr : item(settings.least_norm, dtype);
  if (least == nullptr) return PyErr_Occurred() ? kError : kNo;
  const int64_t elements = number_of_elements(x);
  return elements < 0 ? kError : answer(elements < PyLong_AsSsize_t(least));
}

// Returns the result of a standalone norm, which runs its fused forward, or the operands of its op; nullptr without an
// error if its own code has to run.
PyObject* normed(PyObject* norm, PyObject* x) {
  PyObject* const known = item(settings.norms, class_of(norm));
  PyObject* const state = known == nullptr ? nullptr : state_of(norm);
  if (state == nullptr || is_little_in_eval(state, x) != kNo) return nullptr;
  PyObject* const dtype = dtype_taken(x);
  const Answer recording = dtype == nullptr ? kError : is_recording();
  if (recording == kError || is_undisturbed() != kYes) return nullptr;
  const int64_t width = size_of_last(x);
  const Owned given(width < 0 ? nullptr : PyTuple_New(6));  // x, weight, bias, eps, code, rounded
  PyObject* const operands = given.get();
  if (operands == nullptr || put(operands, 0, x) != kYes || put(operands, 5, PyTuple_GetItem(known, 6)) != kYes) {
    return nullptr;
  }
  if (read_running_norm(norm, width, dtype, operands, 1) != kYes) return nullptr;
  const Answer followed = recording == kYes ? needs_gradient(operands) : kNo;
  return followed == kError ? nullptr : norm_or_operands(operands, followed == kYes);
}

// Returns whether autograd records linear layers of one input, children of a module, and the operands of their op;
// nullptr without an error if the layers have to be called.
PyObject* py_projected(PyObject* given) {
  constexpr Py_ssize_t kMost = 3;
  PyObject* of[3];  // names, module, x
  if (!unpack(given, "too", of)) return nullptr;
  const PastModes modes;
  PyObject *const x = of[2], *const dtype = modes.said() == kYes ? dtype_taken(x) : nullptr;
  PyObject* const state = dtype == nullptr ? nullptr : state_of(of[1]);
  const Answer recording = state == nullptr ? kError : is_recording();
  if (recording == kError || is_autocasting() != kNo || is_undisturbed() != kYes) return nullptr;
  Few found;
  if (read_children(of[1], state, of[0], &found) != kYes) return nullptr;
  const Objects layers = found.all();
  const Owned given_to_op(PyTuple_New(1 + 2 * kMost));  // x, weights, biases
  PyObject* const operands = given_to_op.get();
  if (operands == nullptr || std::ssize(layers) > kMost || put(operands, 0, x) != kYes) return nullptr;
  for (Py_ssize_t i = 0; i < kMost; ++i) {
    const Py_ssize_t weight = 1 + i, bias = 1 + kMost + i;
    const Answer read = i < std::ssize(layers) ? read_linear(layers[i], recording == kYes, operands, weight, bias)
                        : put(operands, weight, Py_None) == kYes ? put(operands, bias, Py_None)
                                                                 : kError;
    if (read != kYes) return nullptr;
  }
  if (are_of(operands, dtype) != kYes) return nullptr;
  const Answer followed = recording == kYes ? needs_gradient(operands) : kNo;
  return followed == kError ? nullptr : PyTuple_Pack(2, followed == kYes ? Py_True : Py_False, operands);
}

PyObject* py_normed(PyObject* given) {
  PyObject* of[2];  // norm, x
  if (!unpack(given, "oo", of)) return nullptr;
  const PastModes modes;
  return modes.said() == kYes ? normed(of[0], of[1]) : nullptr;
}

// Returns use(owner, block, recording) for the block of a plan. The arguments are (plan, module, x, residual, factor,
// modulation, operands).
template <typename Use>
PyObject* with_block(PyObject* const* of, const Use& use) {
  const PastModes modes;
  if (modes.said() != kYes) return nullptr;
  PyObject* const plan = of[0];
  Owner owner;
  Few behind;
  const Answer recording = is_recording(), followed = is_followed(of[2], recording);
  const bool norms_one = (field(plan, kFirst) == Py_None) != (field(plan, kLast) == Py_None);
  if (followed == kError || (followed == kYes && !norms_one)) return nullptr;
  if (is_autocasting() != kNo || open(&owner, plan, of[1], of[6]) != kYes) return nullptr;
  PyObject *const first = owner.part(field(plan, kFirst)), *const last = owner.part(field(plan, kLast));
  const bool known = first != nullptr && last != nullptr && owner.add_all(field(plan, kBehind), &behind);
  const bool wide = field(plan, kWide) == Py_True, modulation_wide = field(plan, kModulationWide) == Py_True;
  const Block block{first, of[5], behind.all(), of[4], of[3], last, wide, modulation_wide};
  return known ? use(owner, block, recording == kYes) : nullptr;
}

// Returns is_left() for the block of an MLP whose activation and first projection are attributes of a module with these
// names, whatever else a call runs: a cheap check before all others. `last` is None if no norm of the sum follows.
Answer looks_left(PyObject* pattern, PyObject* module, PyObject* act, PyObject* first, PyObject* x, PyObject* dtype,
                  PyObject* residual, PyObject* last) {
  PyObject* const projection = child_of(module, first);
  PyObject *const function = child_of(module, act), *const state = state_of(module);
  if (projection == nullptr || state == nullptr) return PyErr_Occurred() ? kError : kNo;
  const bool in_eval = item(state, names().training) == Py_False;
  const Mlp mlp{pattern, x, Objects(&projection, 1), function == nullptr ? Py_None : function, {}, in_eval};
  return is_left(mlp, dtype, {Py_None, Py_None, {}, names().one, residual, last});
}

// Like looks_left(), for a child of the owner that is exactly one MLP.
Answer child_looks_left(PyObject* wholes, PyObject* plan, PyObject* owner, PyObject* x) {
  PyObject* const dtype = dtype_followed(x);
  PyObject* const module = dtype == nullptr ? nullptr : child_of(owner, field(plan, kModule));
  PyObject* const state = module == nullptr ? nullptr : state_of(module);
  PyObject* const own = state == nullptr ? nullptr : own_forward(module, state);
  const Owned forward(own == nullptr ? nullptr : bound_function(own, module));
  PyObject* const segment = forward ? item(wholes, forward.get()) : nullptr;
  PyObject* const parts = segment == nullptr ? Py_None : PyTuple_GetItem(segment, kNames);
  PyObject* const pattern = parts == Py_None ? Py_None : PyTuple_GetItem(parts, 0);
  if (pattern == Py_None) return PyErr_Occurred() ? kError : kNo;  // a list of modules
  if (PyDict_Check(pattern)) return kYes;                          // a mixture, which no op computes under autograd
  PyObject* const names_of_parts = PyTuple_GetItem(parts, 1);
  PyObject *const act = PyTuple_GetItem(names_of_parts, 0), *const first = PyTuple_GetItem(names_of_parts, 1);
  const Answer left = looks_left(pattern, module, act, first, x, dtype, x, Py_None);
  PyObject* const function = left == kYes ? child_of(module, act) : nullptr;
  if (function != nullptr) note_left(module, function);
  return left;
}

PyObject* py_block(PyObject* given) {
  PyObject* of[7];
  if (!unpack(given, "tooooot", of)) return nullptr;
  PyObject* const plan = of[0];
  if (was_left(of[1], plan, of[2])) return PyBool_FromLong(false);
  const PastModes modes;
  if (modes.said() != kYes || PyErr_Occurred()) return nullptr;
  const AsRecorded as_recorded(state_of_first(of[1], of[6]));
  if (PyErr_Occurred()) return nullptr;
  PyObject* const dtype = dtype_followed(of[2]);
  PyObject *const pattern = field(plan, kPattern), *const act = field(plan, kAct);
  PyObject* const first = PyTuple_GetItem(field(plan, kProjections), 0);
  if (dtype != nullptr && looks_left(pattern, of[1], act, first, of[2], dtype, of[3], field(plan, kLast)) == kYes) {
    left_last = nullptr;
    remember_left(of[1], plan, of[2]);
    return PyBool_FromLong(false);
  }
  if (PyErr_Occurred()) return nullptr;
  return with_block(of, [&](const Owner& owner, const Block& block, bool recording) -> PyObject* {
    Few projections, between;
    const Owned act = activation_of(owner, plan);
    const bool known =
        act && owner.add_all(field(plan, kProjections), &projections) && owner.add_all(field(plan, kBetween), &between);
    const Mlp mlp{field(plan, kPattern), of[2], projections.all(), act.get(), between.all(), owner.is_in_eval()};
    return known ? fused(mlp, recording, &block) : nullptr;
  });
}

PyObject* py_block_of(PyObject* given) {
  PyObject* of[8];
  if (!unpack(given, "dtooooot", of)) return nullptr;
  PyObject* const plan = of[1];
  if (was_left(of[2], plan, of[3])) return PyBool_FromLong(false);
  const PastModes modes;
  if (modes.said() != kYes || PyErr_Occurred()) return nullptr;
  const AsRecorded as_recorded(state_of_first(of[2], of[7]));
  if (PyErr_Occurred()) return nullptr;
  left_last = nullptr;
  if (field(plan, kLast) == Py_None && child_looks_left(of[0], plan, of[2], of[3]) == kYes) {
    remember_left(of[2], plan, of[3]);
    return PyBool_FromLong(false);
  }
  if (PyErr_Occurred()) return nullptr;
  return with_block(of + 1, [&](const Owner& owner, const Block& block, bool recording) -> PyObject* {
    PyObject* const module = owner.part(field(plan, kModule));
    PyObject* const found = module == nullptr ? nullptr : block_of(of[0], module, of[3], recording, block);
    if (found == Py_False && was_hooked()) left_last = module;
    return found;
  });
}

PyObject* py_in_turn(PyObject* given) {
  PyObject* of[5];
  if (!unpack(given, "ooddo", of)) return nullptr;
  const PastModes modes;
  if (modes.said() != kYes) return nullptr;
  const Answer asked = is_recording();
  if (is_followed(of[1], asked) != kNo) return nullptr;
  const auto use = [&](const Mlp& mlp, Objects rest) -> PyObject* {
    if (all_pass(rest, asked == kYes) != kYes) return nullptr;
    PyObject* const found = fused(mlp, asked == kYes);
    if (found == nullptr || !PyTuple_Check(found)) return found;
    const Owned operands(found);
    return PyTuple_Pack(2, mlp.pattern, operands.get());
  };
  return in_turn(of[0], of[2], of[3], of[4], of[1], asked == kYes, use);
}

Answer py_hold(PyObject* given) {
  PyObject* of[2];  // conditions, module
  if (!unpack(given, "to", of)) return kError;
  const Answer said = conditions_hold(of[0], of[1]);
  return said == kError && is_answer() ? kNo : said;  // an attribute no longer exists
}

PyObject* py_mixture(PyObject* given) {
  PyObject* of[4];  // records, module, x, shared
  if (!unpack(given, "dooo", of)) return nullptr;
  const PastModes modes;
  if (modes.said() != kYes) return nullptr;
  const Answer recording = is_recording();
  return recording == kError ? nullptr : mixture(of[0], of[1], of[2], recording == kYes, of[3]);
}

PyObject* py_split_mlp(PyObject* given) {
  PyObject* of[6];
  if (!unpack(given, "ddotot", of)) return nullptr;
  if (was_left(of[2], of[3], of[4])) return PyBool_FromLong(false);
  const PastModes modes;
  if (modes.said() != kYes || PyErr_Occurred()) return nullptr;
  const AsRecorded as_recorded(state_of(of[2]));
  if (PyErr_Occurred()) return nullptr;
  left_last = nullptr;
  return split_mlp(of[0], of[1], of[2], of[3], of[4], of[5]);
}

}  // namespace

PyMethodDef plain_module_methods[] = {
    {"configure", py_configure, METH_O, nullptr},
    {"is_bare", boolean<py_is_bare>, METH_O, nullptr},
    {"is_undisturbed", boolean<py_is_undisturbed>, METH_NOARGS, nullptr},
    {"are_items", boolean<py_are_items>, METH_VARARGS, nullptr},
    {"are_unchanged", boolean<are_unchanged>, METH_O, nullptr},
    {"is_recorded", answered<py_is_recorded>, METH_O, nullptr},
    {"runs_as_written", boolean<py_runs_as_written>, METH_VARARGS, nullptr},
    {"directly", answered<py_directly>, METH_VARARGS, nullptr},
    {"fused", answered<py_fused>, METH_VARARGS, nullptr},
    {"adapted", answered<py_adapted>, METH_VARARGS, nullptr},
    {"normed", answered<py_normed>, METH_VARARGS, nullptr},
    {"projected", answered<py_projected>, METH_VARARGS, nullptr},
    {"block", answered<py_block>, METH_VARARGS, nullptr},
    {"block_of", answered<py_block_of>, METH_VARARGS, nullptr},
    {"in_turn", answered<py_in_turn>, METH_VARARGS, nullptr},
    {"hold", boolean<py_hold>, METH_VARARGS, nullptr},
    {"mixture", answered<py_mixture>, METH_VARARGS, nullptr},
    {"split_mlp", answered<py_split_mlp>, METH_VARARGS, nullptr},
    {"forget_left", py_forget_left, METH_NOARGS, nullptr},
    {"save", py_save, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace fused_mlp
