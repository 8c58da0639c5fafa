"""The fast path of a fused call, from the parts of a module to the compiled op.

Inside a model, a call finds the CPU caches full of the rest of the model, so its time depends on the code and data that
it touches. For the common case of plain linear layers and a known activation, compiled code
(torch-ext/calls/plain_modules.h) runs the checks that :mod:`forwards` runs with four other modules. All other cases
fall back to :mod:`forwards`. No state of a module is cached: replaced weights, hooks, adapters, modes and patched
functions are seen as they are at the call.
"""

from __future__ import annotations

from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Callable, Dict, Iterable, Optional, Sequence, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as _torch_module
from torch.utils._device import DeviceContext

from ... import dispatch
from ...activations import ACTIVATIONS, get_activation
from ...adapters import DROPS, run_parts
from ...autograd import blocks as whole_blocks
from ...autograd import nodes, training
from ...backends import native, reference
from ...operands import PLAIN_TENSORS, halves, narrows_float32
from ..matching.pattern import Pattern
from ..parts import adapters, forms, norms, quantized, recognition, refusals
from ..parts.guards import Guards
from ..reading import device_hooks
from ..reading.attributes import FUSED, own_method
from . import forwards, plans
from .plans import Plan, part_of

# Bound once: a name of another module costs two more look-ups.
is_traced, is_grad_enabled = torch.compiler.is_dynamo_compiling, torch.is_grad_enabled
_originals = {(owner, name): original for owner, name, original in refusals._ORIGINALS}


_CALL, _DROPOUT = _originals[nn.Linear, "__call__"], _originals[F, "dropout"]


# Activations, by function or class, with the codes of their rows; those of torch.nn.GELU by its ``approximate``. The
# last item is what modules of a class may hold as their function.
_known: Dict[Any, Tuple[Guards, int, Optional[recognition.Held]]] = {}
# Classes of activations with the kernel forwards that kernelize put into their modules; also classes of norms with
# their fused forwards.
_kernels: Dict[Tuple[type, Callable[..., Tensor]], bool] = {}
# Linear classes other than torch's, and whether their weights are [in, out]; those that are not have no bias.
_linears: Dict[type, Tuple[Guards, bool]] = {}
_OP_NAMES = ("linear", "mlp", "gated_linear", "gated_mlp", "residual_mlp", "residual_gated_mlp")
_TRAINING_OP_NAMES = ("training_forward", "training_backward", "training_backward_")
_TRAINING_OP_NAMES += ("norm_forward", "sum_norm_forward", "norm_backward", "adapted_forward", "adapted_backward")
_TRAINING_OP_NAMES += ("projections_forward", "projections_backward", "rotary")
# The ops without OpOverload's Python overhead.
_ops = {name: getattr(getattr(native, name), "_op", None) for name in (*_OP_NAMES, *_TRAINING_OP_NAMES)}
_act_and_mul = getattr(native.act_and_mul, "_op", None)

# For each op that may be slower than its parts under autograd: the function that runs the parts.
_parts = {"linear": reference.linear}
if native.DEVICE_TYPE == "cpu":
    _parts.update({name: getattr(reference, name) for name in ("mlp", "gated_linear", "gated_mlp")})


def _composed(pattern: Pattern, operands: Tuple[Any, ...], is_as_recorded: bool = False) -> Optional[Tensor]:
    """Run an MLP part by part, given the operands of its op; None if its parts do not fit together."""
    x, *given, code = operands
    product = reference.act_and_mul if is_as_recorded else _product
    weights, biases = given[: len(given) // 2], given[len(given) // 2 :]
    try:
        if not pattern.gated:
            return getattr(reference, pattern.op)(*operands)
        if pattern.packed:
            if weights[0].size(0) % 2 != 0:  # it has no halves
                return None
            weight, bias = (weights[1], biases[1]) if pattern.whole else (None, None)
            return reference.packed_gated(x, weights[0], weight, biases[0], bias, code, pattern.up_first, product)
        if weights[0].size(0) != weights[1].size(0):
            return None
        hidden = product(F.linear(x, weights[0], biases[0]), F.linear(x, weights[1], biases[1]), code)
        return F.linear(hidden, weights[2], biases[2]) if pattern.whole else hidden
    except RuntimeError:  # eager reports what is wrong with the operands
        return None


def _product(gate: Tensor, up: Tensor, code: int) -> Tensor:
    by_torch = gate.requires_grad or up.requires_grad or dispatch.is_small_product(gate)
    return (reference.act_and_mul if by_torch else _act_and_mul)(gate, up, code)


def known_by(act: Union[Act, str]) -> Union[Act, str]:
    """Return the key of an activation in compiled code: the table's function, if a method is or spells out its row."""
    if type(act) is not forms.Form and type(act) is not MethodType:
        return act
    row = forms.row_of(act)
    return act if row is None else row.function


# A function that is true if torch's dispatcher has more to do than to call an op. A future torch may lack it; then all
# ops go through the dispatcher.
_is_profiled = getattr(torch.autograd, "_profiler_enabled", None)


def _handles() -> Optional[Tuple[Callable[..., Any], Callable[..., Any]]]:
    """Return torch's functions from a tensor to a handle and from a list of handles to tensors; None if missing."""
    functions = getattr(torch._C, "_aoti", None)
    to_handle = getattr(functions, "unsafe_alloc_void_ptr_from_tensor", None)
    to_tensors = getattr(functions, "alloc_tensors_by_stealing_from_void_ptrs", None)
    return None if None in (_is_profiled, to_handle, to_tensors) else (to_handle, to_tensors)


# Objects of torch and of this package that compiled code uses; settings.h describes them.
_settings = {
    "tensor": Tensor,
    "parameter": nn.Parameter,
    "linear": nn.Linear,
    "dropout": nn.Dropout,
    "identity": nn.Identity,
    "gelu": nn.GELU,
    "function": FunctionType,
    "builtin": BuiltinFunctionType,
    "method": MethodType,
    "partial": partial,
    "module": nn.Module,
    "module_list": nn.ModuleList,
    "call": _CALL,
    "mark": FUSED,
    "known": _known,
    "known_by": known_by,
    "kernels": _kernels,
    "device_hooks": device_hooks.KNOWN,
    "known_hook": device_hooks.known,
    "composites": recognition.COMPOSITES,
    "adapters": adapters.CLASSES,
    "adapted": run_parts,
    "drops": DROPS,
    "module_dict": nn.ModuleDict,
    "linears": _linears,
    "norms": norms.known,
    "ops": _ops,
    "dtypes": native._DTYPES,
    "float32": torch.float32,
    "is_narrowed": narrows_float32 if native.DEVICE_TYPE == "cpu" else None,
    "on_device": f"is_{native.DEVICE_TYPE}",
    "refusal": native._cached_gpu_refusal if native.DEVICE_TYPE == "cuda" else None,
    "every_gpu": native.takes_every_gpu,
    "parts": {training.KEPT: _parts},
    "least_recorded": dispatch.LEAST_RECORDED,
    "least_work": dispatch.LEAST_WORK,
    "least_sum": dispatch.LEAST_SUM,
    "least_norm": dispatch.LEAST_NORM,
    "blocks": dispatch._open_blocks,
    "is_inference": torch.is_inference_mode_enabled,
    "autocast": (
        torch._C._is_any_autocast_enabled,
        torch.is_autocast_enabled,
        torch.get_autocast_dtype,
        native.DEVICE_TYPE,
        forms.may_be_widened if native.DEVICE_TYPE == "cuda" else None,
    ),
    "composed": _composed,
    "is_transformed": torch._C._are_functorch_transforms_active,
    "quiet": (
        torch._C._len_torch_dispatch_stack,
        torch._C._get_tracing_state,
        torch._C._are_functorch_transforms_active,
    ),
    "modes": (
        torch._C._len_torch_function_stack,
        torch._C._get_function_stack_at,
        DeviceContext,
        torch._C.DisableTorchFunction,
    ),
    "empty": (
        _torch_module._global_forward_hooks,
        _torch_module._global_forward_pre_hooks,
        _torch_module._global_backward_hooks,
        _torch_module._global_backward_pre_hooks,
    ),
    "unchanged": (
        (forward_ad, "_current_level", -1),
        (nn.Linear, "__call__", _CALL),
        (nn.Linear, "forward", _originals[nn.Linear, "forward"]),
        (F, "linear", _originals[F, "linear"]),
        (nn.Dropout, "forward", refusals.unpatched(nn.Dropout, "forward", nn.modules.dropout)),
        (F, "dropout", _DROPOUT),
        (nn.Identity, "forward", refusals.unpatched(nn.Identity, "forward", nn.modules.linear)),
        *refusals._CODES,
    ),
    "exchange": None if _is_profiled is None else getattr(Tensor, "__dlpack_c_exchange_api__", None),
    "is_negated": Tensor.is_neg,
    "empty_like": torch.empty_like,
    "is_profiled": _is_profiled,
    "handles": _handles(),
    "shares": training.SHARES,
    "work_of_many": dispatch.WORK_OF_MANY,
    "saved_tensors_hooks": torch._C._autograd._top_saved_tensors_default_hooks,
    "layout": nodes.layout,
    "edges": nodes.edges,
    "quantised": quantized.COMPILED,
    "codes": quantized.CODES,
    "offsets": quantized.OFFSETS,
    "few_rows": dispatch.FEW_QUANTIZED_ROWS,
    "most_rows": dispatch.most_rows_of_size,
}
plain = native.plain_modules  # None if this build has no compiled code
if plain is not None:
    plain.configure(_settings)

Act = Union[nn.Module, Callable[[Tensor], Tensor]]
Modulation = Optional[Tuple[Tensor, Optional[Tensor]]]  # scale and shift
OF_ENDING = (get_activation("linear").function,)  # the operands of a block with a single layer


def fused(plan: Plan, module: Optional[nn.Module], x: Tensor, operands: Tuple[Any, ...] = ()) -> Optional[Tensor]:
    """Run a plan by compiled code if there is any, else by ``forwards``; None if no op takes it."""
    if plain is not None and not is_traced():  # Dynamo cannot trace compiled code
        found = plain.fused(plan, module, x, operands)
        if type(found) is tuple:
            found = recorded_or_packed(plan.pattern, *found)
        if found is False:  # an adapter's input dropout is active, which no op supports
            return None
        if found is not None:
            return found
        has_known = _has_known(plan, module, x, operands)
        if not (has_known or _is_asked_again(module, plan.names)):
            return None
        if not has_known:  # otherwise the classes were learned when the model was fused
            learn(part_of(module, plan.act, operands))
            learn_layers(part_of(module, plan.projections, operands))
    if not is_grad_enabled() and (module is None or module.training) and is_as_recorded(module, x, operands):
        return training.as_recorded(lambda given: _by_python(plan, module, given, operands), x)
    return _by_python(plan, module, x, operands)


def _by_python(plan: Plan, module: Optional[nn.Module], x: Tensor, operands: Tuple[Any, ...]) -> Optional[Tensor]:
    projections, act, between = (part_of(module, part, operands) for part in (plan.projections, plan.act, plan.between))
    if not plan.pattern.whole and forms.is_widened(act, x):
        return None
    return forwards.fused(plan.pattern, x, projections, forms.row_of(act), between)


def is_as_recorded(module: Optional[nn.Module], x: Any, operands: Tuple[Any, ...] = ()) -> bool:
    """``training.is_as_recorded`` for a module, or for the first module among the operands.

    Callers first check the two flags that most calls fail, autograd off and training mode, which needs no Python frame.
    """
    if module is None:
        module = next((operand for operand in operands if isinstance(operand, nn.Module)), None)
    return module is not None and isinstance(x, Tensor) and training.is_as_recorded(module, x)


def is_left_in_training(module: nn.Module, method: FunctionType, *given: Any) -> bool:
    """True if autograd records a call of a fused module that no op supports in training, so ``method`` of its class
    runs.

    Checked first, this saves such a call all other checks.
    """
    if not is_grad_enabled() or is_traced() or torch._C._get_tracing_state() is not None:
        return False
    if FUSED not in module.__dict__ or type(module).forward is not method:
        return False
    for tensor in (*given, *module._parameters.values()):
        if type(tensor) in PLAIN_TENSORS and tensor.requires_grad:
            return True
    return False


def fused_parts(
    pattern: Pattern, x: Tensor, projections: Tuple[nn.Module, ...], act: Act, between: Sequence[forwards.Part] = ()
) -> Optional[Tensor]:
    """Like :func:`fused`, for parts given as objects."""
    plan = plans.of_operands(pattern, len(projections), len(between))
    return fused(plan, None, x, (*projections, act, *between))


def _has_known(plan: Plan, module: Optional[nn.Module], x: Any, operands: Tuple[Any, ...]) -> bool:
    """True if a projection has an adapter or quantised weight that compiled code does not handle but Python may."""
    found = False
    for part in plan.projections:
        held = operands[part] if type(part) is int else getattr(module, part)
        if type(held) is nn.Linear and type(held.__dict__["_parameters"].get("weight")) in PLAIN_TENSORS:
            continue
        if adapters.known(type(held)) is not None:
            if adapters.is_plainly_left(held):
                return False
            found = True
        elif quantized.is_known(held):
            if quantized.is_plainly_left(held, x):
                return False
            found = found or dispatch.may_take_quantized()
    return found


_missed: Dict[Tuple[Any, ...], int] = {}  # count by ids of classes, to keep no references, and by part names


def _is_asked_again(module: Optional[nn.Module], names: Tuple[str, ...]) -> bool:
    """True if Python has to examine parts that compiled code does not take, for autocast or a forced backend.

    Python also learns classes, so this is true for the first, second, fourth, eighth, ... miss.
    """
    if torch._C._get_tracing_state() is not None:  # tracing names what it records by the attributes that are read
        return False
    if torch._C._is_any_autocast_enabled() or len(dispatch._open_blocks) > 1:
        return True
    key = (id(type(module)), *names)
    count = _missed[key] = _missed.get(key, 0) + 1
    return count & (count - 1) == 0


def block(
    plan: Plan,
    module: Optional[nn.Module],
    x: Tensor,
    residual: Tensor,
    factor: Any = 1.0,
    modulation: Modulation = None,
    operands: Tuple[Any, ...] = (),
) -> Optional[Tensor]:
    """Run the block of an MLP or layer, ``last(residual + behind(mlp(first(x))) * factor)``; None if no op takes it.

    A norm that is None is skipped. With a ``modulation``, ``first(x) * (1 + scale) + shift`` replaces ``first(x)``.

    The rows of the result are adjacent. The factor is a number or a per-feature scale. Like the scale and shift of a
    modulation, it applies to all rows or to consecutive groups of rows.
    """
    found = None if plain is None else plain.block(plan, module, x, residual, factor, modulation, operands)
    if type(found) is tuple:
        return of_operands(*found)
    return None if found is False else found


def ending(plan: Plan, module: nn.Module, x: Tensor, residual: Tensor) -> Optional[Tensor]:
    """Run ``last(behind(projection(x)) + residual)`` as one op; None if none takes it. The activation is an operand."""
    return block(plan, module, x, residual, operands=OF_ENDING)


def of_operands(pattern: Pattern, operands: Tuple[Any, ...], dropout: Optional[float] = None) -> Optional[Tensor]:
    """Run the block whose operands compiled code returned; None if no op supports it.

    ``dropout`` is given for a call that autograd records, or that must have the bits of one: the probability of active
    dropout after the MLP. A recorded block is one node.
    """
    if dropout is None:
        return _packed_block(pattern, operands)
    *mlp, residual, _, weight, bias, eps, code, last_weight, last_bias, last_eps, last_code, is_of_sum = operands
    x, *given, activation = mlp
    if is_of_sum:
        weight, bias, eps, code = last_weight, last_bias, last_eps, last_code
    else:
        residual = None  # None means x
        if (weight is not None and weight.dim() != 1) or (bias is not None and bias.dim() != 1):
            return None
    if len(given) == 6:
        layers, up_first = (x, *given), None
    elif len(given) == 2:  # one layer
        layers, up_first = (x, given[0], None, None, given[1], None, None), None
    else:
        first, second, first_bias, second_bias = given
        layers, up_first = (x, first, None, second, first_bias, None, second_bias), None
        if pattern.packed:
            up_first = pattern.up_first
            if not _are_halves(first, first_bias):
                return None
    memory, keep = pattern.memory, None
    is_recorded = is_grad_enabled()
    if len(given) > 2:
        if activation == training.NO_ACTIVATION:
            return None
        if not is_recorded:
            layers = (training.likened(x, given[0], memory), *layers[1:])
        keep = memory == training.KEPT or training.keeps(layers, memory)
        if keep and not given[0].requires_grad and training.is_first_frozen(*layers):
            return None
    try:
        given = (*layers, residual, weight, bias, (eps, code, activation, up_first, keep, dropout))
        if not is_recorded:
            return whole_blocks.pre_normed_alone(given) if residual is None else whole_blocks.post_normed_alone(given)
        return whole_blocks.pre_normed(*given) if residual is None else whole_blocks.post_normed(*given)[0]
    except RuntimeError:  # eager reports what is wrong with the operands
        return None


def _packed_block(pattern: Pattern, operands: Tuple[Any, ...]) -> Optional[Tensor]:
    """Run the block of a gated MLP whose gate and up are halves of one projection; None if no op supports it."""
    x, gate_up, down, gate_up_bias, down_bias, *others = operands
    if not _are_halves(gate_up, gate_up_bias):
        return None
    weights, biases = halves(gate_up, pattern.up_first), halves(gate_up_bias, pattern.up_first)
    try:
        return _ops["residual_gated_mlp"](x, *weights, down, *biases, down_bias, *others)
    except RuntimeError:  # eager broadcasts the operands or reports what is wrong
        return None


def recorded_or_packed(pattern: Pattern, recorded: bool, operands: Tuple[Any, ...]) -> Optional[Tensor]:
    """Run an op, given x, the projections' parameters and the activation's code; None if no op supports it.

    ``recorded``: autograd records the call, or the call must have the bits of one that is recorded.
    """
    x, *given = operands
    code, count = given[-1], len(given) // 2
    weights, biases, up_first = given[:count], given[count:-1], None
    if recorded and not is_grad_enabled():
        x = training.likened(x, weights[0], pattern.memory)
    if pattern.packed:
        if not _are_halves(weights[0], biases[0]):
            return None
        if recorded:
            up_first, nothing = pattern.up_first, (None,) * (3 - count)
            weights, biases = (weights[0], *nothing, *weights[1:]), (biases[0], *nothing, *biases[1:])
        else:
            weights = (*halves(weights[0], pattern.up_first), *weights[1:])
            biases = (*halves(biases[0], pattern.up_first), *biases[1:])
    name = "gated_mlp" if len(weights) == 3 else pattern.op
    try:
        if not recorded:
            return _ops[name](x, *weights, *biases, code)
        if name in ("linear", "mlp") and training.is_left_to_parts(name, (x, *weights, *biases), code, pattern.memory):
            return getattr(reference, name)(x, *weights, *biases, code)
        if training.refusal(name, code) is not None:
            return None
        return training.run(name, (x, *weights, *biases), code, pattern.memory, up_first, is_quiet=True)
    except RuntimeError:  # eager broadcasts the operands or reports what is wrong
        return None


def _are_halves(weight: Tensor, bias: Optional[Tensor]) -> bool:
    return weight.size(0) % 2 == 0 and (bias is None or bias.shape == weight.shape[:1])


def learn_layers(projections: Iterable[nn.Module]) -> None:
    """Add the linear classes other than torch's to those known."""
    for projection in projections:
        kind = type(projection)
        if kind not in _linears and refusals.is_other_linear(projection) and refusals.is_as_written(kind):
            addmm = torch, "addmm", _originals[torch, "addmm"]  # called by Conv1D
            unchanged = (kind, "__call__", _CALL), (kind, "forward", kind.forward), addmm
            _linears[kind] = Guards((*unchanged, *refusals.codes_of(kind.forward))), refusals.is_transposed(kind)


def learn(act: Act) -> None:
    """Add an activation, or its class, to those known, along with the kernel that kernelize put into it.

    It is added if the table names it and it is unaltered, or if its code was analysed.
    """
    kind, key, own, of_class = type(act), act, None, ()
    if isinstance(act, nn.Module):
        forward = getattr(kind, "forward", None)
        key, of_class = kind, ((kind, "__call__", _CALL), (kind, "forward", forward))
        if isinstance(forward, FunctionType):
            of_class += ((forward, "__code__", forward.__code__),)
        if kind is nn.GELU:
            key = act.approximate
        own = own_method(act, "forward")
        own = None if own is forward else own
    elif kind not in (FunctionType, BuiltinFunctionType):
        return
    if key in _known and (own is None or (kind, own) in _kernels):
        return
    row, is_named = recognition.activation_of(act), recognition.is_named(act)
    if row is None or (own is not None and not is_named):
        return
    functions = ((owner, name, _originals[owner, name]) for owner, name in row.calls)
    guards = Guards((*of_class, *functions)) if is_named else recognition.guards_of_read(act)
    if guards is None:
        return
    if own is not None:
        _kernels[kind, own] = True
    if key not in _known:  # another thread may be reading the entry
        _known[key] = guards, row.code, recognition.held_by(kind)


def know_kernel(kind: type, forward: FunctionType) -> None:
    """Register a forward that modules of a class may hold, which computes the same as the class's own."""
    _kernels[kind, forward] = True


for _row in ACTIVATIONS:
    learn(_row.function)
