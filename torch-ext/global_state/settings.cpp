#include "settings.h"

#include "../calls/answers.h"
#include "../calls/direct/call.h"

namespace fused_mlp {
namespace {

// In the order of Settings.
constexpr const char* kSettings[] = {
    "tensor",         "parameter",   "linear",       "dropout",      "identity",
    "gelu",           "function",    "builtin",      "method",       "partial",
    "module",         "module_list", "call",         "mark",         "known",
    "known_by",       "kernels",     "device_hooks", "known_hook",   "composites",
    "adapters",       "adapted",     "drops",        "module_dict",  "linears",
    "norms",          "ops",         "dtypes",       "float32",      "is_narrowed",
    "on_device",      "refusal",     "every_gpu",    "parts",        "least_recorded",
    "least_work",     "least_sum",   "least_norm",   "blocks",       "is_inference",
    "is_transformed", "quiet",       "autocast",     "composed",     "modes",
    "empty",          "unchanged",   "exchange",     "is_negated",   "empty_like",
    "is_profiled",    "handles",     "shares",       "work_of_many", "saved_tensors_hooks",
    "layout",         "edges",       "quantised",    "codes",        "offsets",
    "few_rows",       "most_rows"};
static_assert(sizeof(Settings) == sizeof(kSettings));

const Names* made_names = nullptr;

}  // namespace

Settings settings{};

const Names& names() { return *made_names; }

bool configure(PyObject* given) {
  if (!PyDict_Check(given)) {
    PyErr_Format(PyExc_TypeError, "settings must be a dict, got %R", class_of(given));
    return false;
  }
  Settings read{};
  PyObject** place = &read.tensor;
  for (const char* name : kSettings) {
    *place = PyDict_GetItemString(given, name);
    if (*place == nullptr) {
      PyErr_Format(PyExc_KeyError, "settings lack %s", name);
      return false;
    }
    Py_INCREF(*place++);
  }
  if (!configure_direct_calls(read.exchange, read.is_negated, read.empty_like, read.is_profiled)) return false;
  settings = read;
  static const Names made;
  made_names = &made;
  return true;
}

}  // namespace fused_mlp
