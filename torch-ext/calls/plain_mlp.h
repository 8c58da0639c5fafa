#pragma once

#include <cstdint>

#include "parts.h"

// MLPs of plain parts, and their blocks: whether an op may compute one, where autograd and autocast are on too, and the
// call of it.
namespace fused_mlp {

// An MLP, or a part of one, as a module has it now.
struct Mlp {
  PyObject* pattern;
  PyObject* x;
  Objects projections;
  PyObject* act;
  Objects between;
  bool in_eval = false;  // the module is known to be in eval mode
  bool asks = false;     // False is an answer: a dropout in front of an adapter is active, which no op takes
};

// The block around an MLP: the norm of its input, and what modulates that: a tuple of a scale that is
// stored less 1 and a shift, perhaps of float32; behind its last projection what may pass values on, and among that a
// norm or a scale; a factor, which is a number or a scale; the sum with the residual; and the norm of that. None where
// there is no norm, or nothing modulates it.
struct Block {
  PyObject *first, *modulation;
  Objects behind;
  PyObject* factor;
  PyObject* residual;
  PyObject* last;
  bool wide = false;             // the factor may be of float32, as the source adds up in that
  bool modulation_wide = false;  // likewise
};

// The number of operands of an op that are those of a block.
constexpr Py_ssize_t kBlockOperands = 11;

// The dtype of a tensor that the compiled ops take, and are free to: borrowed; nullptr where they do not.
PyObject* dtype_taken(PyObject* x);

// The dtype of a tensor that autograd follows, at the cost of few questions: in a small model's call each function of
// torch that is asked takes a microsecond. Borrowed; nullptr, which is no error in itself, where more has to be asked.
// What is left by it is computed as it was written, whatever else there is to ask.
PyObject* dtype_followed(PyObject* x);

// True if an operand is a torch.Tensor or an nn.Parameter, and no subclass of them.
bool is_tensor(PyObject* operand);

// True if all of these operands, among which are tensors, numbers and None, that are tensors are of a dtype.
Answer are_of(PyObject* operands, PyObject* dtype);

// True if one of these operands needs a gradient. An error, which may not be set, where torch is to say.
Answer needs_gradient(PyObject* operands);

// The number of a tensor's elements; negative as sizes are (parts.h).
int64_t number_of_elements(PyObject* tensor);

// True if an activation is several operations of torch, so that its parts take long.
Answer is_composite(PyObject* act);

// True if the first layer does too little on a GPU for an op that autograd records, by so many multiplications.
Answer is_little_work(bool gated, bool in_eval, int64_t work);

// True if an MLP of plain layers that autograd follows, or its block, does too little for an op that is recorded, as
// far as its first layer tells.
Answer is_left(const Mlp& mlp, PyObject* dtype, const Block& block);

// The result, or the operands of the op where that is left to Python. nullptr is an error where one is set, else an
// answer: it is not known. With a block, the result is that of the block, and what is left is the pattern and the
// operands, where gate and up are packed or autograd follows, and then also the probability of an active dropout behind
// the MLP.
//
// False is an answer where autograd follows, and a block does too little for an op.
//
// If `adapted`, it is known only if a projection has an adapter, or a quantised weight.
PyObject* fused(const Mlp& mlp, bool recording, const Block* block = nullptr, bool adapted = false);

}  // namespace fused_mlp
