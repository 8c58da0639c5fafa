#pragma once

#include "../plain_mlp.h"

namespace fused_mlp {

// The result of the block of a mixture: of its router and its experts, and where there is a `block` of the norm in
// front of them and the sum with the residual. A block with a shared part takes the result of that, and without it
// gives the part's name, where nothing else is in the way. nullptr without an error where the modules have to be
// called: what was recorded of the block (models/experts/blocks.py) does not hold, autograd follows, or operands do not
// fit.
PyObject* mixture(PyObject* records, PyObject* module, PyObject* x, bool recording, PyObject* shared,
                  const Block* block = nullptr);

}  // namespace fused_mlp
