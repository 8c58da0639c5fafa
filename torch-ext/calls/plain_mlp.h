#pragma once

#include <cstdint>

#include "parts.h"

// MLPs of plain parts, and their blocks: decides whether an op may compute one, also under autograd and autocast, and
// calls the op.
namespace fused_mlp {

// An MLP, or a part of one, in its module's present state.
struct Mlp {
  PyObject* pattern;
  PyObject* x;
  Objects projections;
  PyObject* act;
  Objects between;
  bool in_eval = false;  // the module is known to be in eval mode
  bool asks = false;     // returns False if nothing in Python would take the call either
};

// The block around an MLP: the norm of its input; the modulation of that norm, a tuple of a scale that is stored less 1
// and a shift, perhaps float32; parts after the last projection, of which one may be a norm or a scale; a factor, which
// is a number or a scale; the sum with the residual; and the norm of that sum. A missing norm or modulation is None.
struct Block {
  PyObject *first, *modulation;
  Objects behind;
  PyObject* factor;
  PyObject* residual;
  PyObject* last;
  bool wide = false;             // the factor may be float32, because the source adds in float32
  bool modulation_wide = false;  // likewise
};

// Number of operands that a block adds to those of its op.
constexpr Py_ssize_t kBlockOperands = 11;

// Returns the dtype of a tensor that the compiled ops support and may compute, borrowed; nullptr otherwise.
PyObject* dtype_taken(PyObject* x);

// True if x is a tensor of a dtype that no op supports, outside autocast and with no backend forced.
Answer is_of_other_dtype(PyObject* x);

// Returns the dtype of a tensor that is part of the autograd graph, after few checks: in a small model, each call of a
// torch function takes a microsecond. Borrowed; nullptr, without necessarily an error, if more checks are needed. A
// call that is not fused because of it runs the original code, whatever other checks would say.
PyObject* dtype_followed(PyObject* x);

// True if an operand is a torch.Tensor or an nn.Parameter, not of a subclass.
bool is_tensor(PyObject* operand);

// True if all tensors among these operands, which may include numbers and None, have this dtype.
Answer are_of(PyObject* operands, PyObject* dtype);

// True if one of these operands needs a gradient. kError, perhaps without an error set, if torch has to decide.
Answer needs_gradient(PyObject* operands);

// Returns a tensor's number of elements; negative like sizes (parts.h).
int64_t number_of_elements(PyObject* tensor);

// True if an activation consists of several torch operations, so that running its parts takes long.
Answer is_composite(PyObject* act);

// True if a first layer with this many multiplications is too small on a GPU for an op that autograd records.
Answer is_little_work(bool gated, bool in_eval, int64_t work);

// True if an MLP of plain layers under autograd, or its block, is too small for a recorded op, judged by its first
// layer.
Answer is_left(const Mlp& mlp, PyObject* dtype, const Block& block);

// Returns the result, or if Python has to call the op, whether it is recorded and its operands. nullptr without an
// error means unknown. With a block, the result is the block's. Then, if gate and up are packed or autograd records, it
// returns the pattern and the operands, and under autograd also the probability of an active dropout after the MLP.
//
// Returns False if autograd records and a block is too small for an op. For a block without a gate, and an MLP that
// `asks`, it does so too if calling the first projection does more than run that layer's forward, as with hooks: then
// no part of the MLP can be fused, and was_hooked() is true until the next call. An MLP that `asks` is also refused if
// a dropout before an adapter is active, or if its quantised layers compute this many rows themselves.
//
// If `adapted`, a result is known only if a projection has an adapter or a quantised weight.
PyObject* fused(const Mlp& mlp, bool recording, const Block* block = nullptr, bool adapted = false);
bool was_hooked();

}  // namespace fused_mlp
