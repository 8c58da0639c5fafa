#pragma once

#include "registration.h"  // and with it Python.h

namespace fused_mlp {

// The functions of the extension as a Python module: what a fused call asks of the modules that it stands for, each
// time anew. In Python the same questions take most of a small call: inside of a model the processor's caches are full
// of the rest of the model, and an interpreter touches far more code and data than this does.
//
//   configure(settings)
//     Takes what the others need, once: the fields of `Settings` (settings.h).
//   is_bare(module) -> bool
//     True if calling a module runs the forward of its class and nothing else: no hooks, no forward of its own.
//   is_undisturbed() -> bool
//     True if nothing that the settings name watches or changes every call.
//   are_items(dictionary, pairs) -> bool
//     True if each name in the tuple stands for its value in the dictionary, or for none if it is alone there.
//   are_unchanged(attributes) -> bool
//     True if each attribute (owner, name, value) is still that object, and (dictionary, name) not there. Raises
//     AttributeError where it is gone.
//   is_recorded(operands) -> bool | None
//     True if autograd records the op of these operands, tensors or None, the first of them the input. None where the
//     op cannot take them, or something has to see its parts.
//   runs_as_written(x, module, gated) -> bool
//     True if a method of the module, which has an MLP of x in it, likely takes less time as it was written: where
//     autograd records the MLP, or autocast casts for it, and it is small. In place of `gated` the name of its first
//     projection, for a block whose parts are the module's.
//   directly(gated, operands) -> Tensor | None
//     Computes the op of a layer, of an MLP or of its block past torch's dispatcher (direct/call.h); None where
//     the op has to be called. `is_recorded` has taken the operands, or would, and autograd does not record them.
//   fused(plan, module, x, operands) -> Tensor | tuple | None
//     The result of the op that the plan's pattern names, if calling the linear layers, the activation and what is
//     between would compute nothing else: all of them plain, and between nothing but inactive dropout. A part of a plan
//     is the name of a child of the module, or the index of an operand. Where autograd follows, and the parts take less
//     time than the op, the result of torch's functions. Where it follows else, or gate and up are packed and the op
//     cannot be called directly, its operands but x: weights, then biases (None where there is none), and the
//     activation's code. None where it cannot be known, or what was called raised RuntimeError.
//   normed(norm, x) -> Tensor | tuple | None
//     The result of a norm whose class is known, and that is being called: hooks are not asked for. The operands of its
//     op where autograd follows, or torch's dispatcher has more to do. None where its own code has to run.
//   block(plan, module, x, residual, factor, modulation, operands) -> Tensor | tuple | None
//     The same for a whole MLP and what is around it: the norm of x, modulated by (scale, shift) or by nothing; parts
//     behind the MLP that pass values on, and among them a norm or a scale; a factor, the sum with a residual, and the
//     norm of that. A norm that is None does nothing. Where gate and up are packed, and the op cannot be called
//     directly, (pattern, the op's operands). Where autograd follows, and the block is x + mlp(norm(x)), or the norm of
//     the sum of a residual and a result, (pattern, the op's operands, probability of a dropout behind the MLP).
//   block_of(wholes, plan, module, x, residual, factor, modulation, operands) -> Tensor | tuple | None
//     The same of a child that is an MLP and no more. The dictionary holds segments as `split_mlp` has them, with the
//     parts of the MLP (models/running/split_mlps.py).
//   hold(conditions, module) -> bool
//     True if the conditions of a module (models/experts/conditions.py) hold.
//   mixture(records, module, x, shared) -> Tensor | str | None
//     The result of the block of a mixture, of its router and its experts, past torch's dispatcher. Where a shared part
//     has to be called first, whose result is given then, its name. None where the block has no record that holds
//     (models/experts/blocks.py), or operands do not fit.
//   split_mlp(firsts, seconds, owner, names, x, rest) -> Tensor | (Tensor, second segment, second module) | block's |
//     None
//     The same for an MLP that is split over two children of a module, `names` being those of the second and the first,
//     up to what its last projection gives, the second being given `rest` besides. The dictionaries hold segments by
//     forwards, a segment being a tuple that begins with (forward, names, ending): of a first module (pattern, (name of
//     the activation, names of projections)), of a second the names of its projection, of the dropout in it and of the
//     norm, or None. Where the second ends with the sum with what it is given besides, the ending is whether a norm
//     follows: the op may then compute that too, and the result is that of the second module, or where autograd
//     follows what `block` gives.
extern PyMethodDef plain_module_methods[];

}  // namespace fused_mlp
