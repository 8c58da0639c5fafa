#include "conditions.h"

#include "../../global_state/settings.h"
#include "../parts.h"

namespace fused_mlp {
namespace {

enum Field : Py_ssize_t { kKind, kOwn, kParts, kCalled, kItems, kAttributes, kAbsent };

// Returns the first answer of `ask` for an element of a tuple that is not kYes.
template <typename Ask>
Answer all(PyObject* tuple, const Ask& ask) {
  for (Py_ssize_t i = 0, count = PyTuple_Size(tuple); i < count; ++i) {
    const Answer said = ask(PyTuple_GetItem(tuple, i));
    if (said != kYes) return said;
  }
  return kYes;
}

Answer is_bare_part(PyObject* part) {
  PyObject* const state = state_of(part);
  return state == nullptr ? kError : is_bare(part, state, true);
}

Answer is_absent(PyObject* named) {  // (name, object that must not contain it)
  const int found = PySequence_Contains(PyTuple_GetItem(named, 1), PyTuple_GetItem(named, 0));
  return found < 0 ? kError : answer(found == 0);
}

}  // namespace

Answer conditions_hold(PyObject* conditions, PyObject* module) {
  const auto field = [&](Field which) { return PyTuple_GetItem(conditions, which); };
  PyObject* const state = class_of(module) == field(kKind) ? state_of(module) : nullptr;
  if (state == nullptr) return PyErr_Occurred() ? kError : kNo;
  PyObject* const modules = item(state, names().modules);
  if (modules == nullptr || !PyDict_Check(modules)) return PyErr_Occurred() ? kError : kNo;
  Answer said = are_items(state, field(kOwn));
  if (said == kYes) said = are_items(modules, field(kParts));
  if (said == kYes) {
    said = all(field(kItems), [](PyObject* of) { return are_items(PyTuple_GetItem(of, 0), PyTuple_GetItem(of, 1)); });
  }
  if (said == kYes) said = all(field(kCalled), is_bare_part);
  if (said == kYes) said = are_unchanged(field(kAttributes));
  return said == kYes ? all(field(kAbsent), is_absent) : said;
}

}  // namespace fused_mlp
