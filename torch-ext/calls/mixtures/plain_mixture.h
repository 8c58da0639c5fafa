#pragma once

#include "../plain_mlp.h"

namespace fused_mlp {

// Returns the result of the block of a mixture: its router and its experts, and, given a `block`, the norm of their
// input and the sum with the residual. For a block with a shared part, the argument is that part's result; without it
// the part's name is returned, if all other checks pass. nullptr without an error if the modules have to be called: the
// block's record (models/experts/blocks.py) does not hold, autograd records, or operands do not fit.
PyObject* mixture(PyObject* records, PyObject* module, PyObject* x, bool recording, PyObject* shared,
                  const Block* block = nullptr);

}  // namespace fused_mlp
