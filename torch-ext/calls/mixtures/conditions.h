#pragma once

#include "../answers.h"

namespace fused_mlp {

// True if the conditions of a module (models/experts/conditions.py) hold.
Answer conditions_hold(PyObject* conditions, PyObject* module);

}  // namespace fused_mlp
