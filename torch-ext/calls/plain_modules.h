#pragma once

#include "registration.h"  // and with it Python.h

namespace fused_mlp {

// The functions of the extension as a Python module: the checks that a fused call makes, each time, on the modules that
// it replaces. In Python these checks take most of a small call: inside a model the CPU caches are full of the rest of
// the model, and an interpreter touches far more code and data than this does.
//
//   configure(settings)
//     Sets what the other functions need, once: the fields of `Settings` (settings.h).
//   is_bare(module) -> bool
//     True if calling a module runs only the forward of its class: no hooks, no forward of its own.
//   is_undisturbed() -> bool
//     True if nothing that the settings name watches or changes every call.
//   are_items(dictionary, pairs) -> bool
//     True if the dictionary has each (name, value) of the tuple, and lacks each (name,).
//   are_unchanged(attributes) -> bool
//     True if each attribute (owner, name, value) is still that object, and each (dictionary, name) is missing. Raises
//     AttributeError if an attribute no longer exists.
//   is_recorded(operands) -> bool | None
//     True if autograd records the op of these operands, tensors or None, with the input first. None if the op does not
//     support them, or something has to observe its parts.
//   runs_as_written(x, module, gated) -> bool
//     True if the original code of a method of the module that contains an MLP of x is likely faster: if autograd
//     records the MLP, or autocast casts for it, and it is small. For a block whose parts belong to the module, `gated`
//     is the name of the first projection instead.
//   directly(gated, operands) -> Tensor | None
//     Computes the op of a layer, an MLP or its block past torch's dispatcher (direct/call.h); None if the op has to be
//     called. The operands have passed `is_recorded`, or would, and autograd does not record them.
//   fused(plan, module, x, operands) -> Tensor | tuple | None
//     The result of the op that the plan's pattern names, if calling the linear layers, the activation and the parts in
//     between would compute the same: all are plain, and only inactive dropout is in between. A part of a plan is the
//     name of a child of the module, or the index of an operand. Under autograd, if the parts are faster than the op,
//     the result of torch's functions. Otherwise under autograd, or if gate and up are packed and the op cannot be
//     called directly, (whether autograd records, the op's operands: x, weights, then biases, of which any may be None,
//     and the activation's code). None if the result is unknown, or if something called raised RuntimeError. In
//     training mode under no_grad(), here and below, as if autograd recorded.
//   normed(norm, x) -> Tensor | tuple | None
//     The result of a norm of a known class that is being called: hooks are not checked. Its op's operands if autograd
//     records or torch's dispatcher has more to do. None if its own code has to run.
//   block(plan, module, x, residual, factor, modulation, operands) -> Tensor | tuple | None
//     Like `fused`, for a whole MLP and its block: the norm of x, optionally modulated by (scale, shift); parts after
//     the MLP that pass values on, one of which may be a norm or a scale; a factor; the sum with a residual; and the
//     norm of that sum. A norm that is None is skipped. If gate and up are packed, and the op cannot be called
//     directly, (pattern, the op's operands). Under autograd, if the block is x + mlp(norm(x)), or the norm of the sum
//     of a residual and a result, (pattern, the op's operands, probability of a dropout after the MLP).
//   block_of(wholes, plan, module, x, residual, factor, modulation, operands) -> Tensor | tuple | None
//     Like `block`, for a child that is exactly one MLP. The dictionary holds segments like those of `split_mlp`, with
//     the parts of the MLP (models/running/split_mlps.py).
//   hold(conditions, module) -> bool
//     True if the conditions of a module (models/experts/conditions.py) hold.
//   mixture(records, module, x, shared) -> Tensor | str | None
//     The result of the block of a mixture, its router and its experts, past torch's dispatcher. If a shared part must
//     be called first, its name; the next call passes its result. None if the block has no valid record
//     (models/experts/blocks.py), or operands do not fit.
//   split_mlp(firsts, seconds, owner, names, x, rest) -> Tensor | (Tensor, second segment, second module) | block's |
//     None
//     Like `fused`, for an MLP that is split over two children of a module, up to the result of its last projection.
//     `names` are the names of the second and the first child; `rest` are the second's further arguments. The
//     dictionaries map forwards to segments, tuples that begin with (forward, names, ending). The names of a first
//     module are (pattern, (name of the activation, names of projections)); those of a second are the names of its
//     projection, its dropout and its norm, or None. If the second module ends with the sum with its further argument,
//     the ending says whether a norm follows. The op may then compute that too: the result is that of the second
//     module, or under autograd the same as that of `block`.
//   forget_left() -> None
//     Forgets which calls were too small for an op: the functions above remember some.
extern PyMethodDef plain_module_methods[];

}  // namespace fused_mlp
