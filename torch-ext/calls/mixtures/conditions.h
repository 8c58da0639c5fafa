#pragma once

#include "../answers.h"

namespace fused_mlp {

// True if the conditions (models/experts/conditions.py) of a module hold.
Answer conditions_hold(PyObject* conditions, PyObject* module);

}  // namespace fused_mlp
