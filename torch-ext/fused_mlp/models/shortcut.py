"""The short way of a fused call: from the parts of a module to the compiled op.

A call inside of a model finds the processor's caches full of the rest of the model, so its time goes with the code and
the data that it touches. Of the commonest case, plain linear layers and a known activation, compiled code
(torch-ext/plain_modules.h) asks what :mod:`forwards` asks with the help of four other modules. All other cases are left
to that. Nothing is remembered of a module: weights that were replaced, hooks, adapters, modes and patched functions are
seen as they are at the call.
"""

from __future__ import annotations

from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as _torch_module
from torch.utils._device import DeviceContext

from .. import dispatch, training
from ..activations import ACTIVATIONS, get_activation
from ..backends import native, reference
from ..operands import halves
from . import forms, forwards, norms, obstacles, recognition
from .pattern import Pattern
from .switching import FUSED

is_traced = torch.compiler.is_dynamo_compiling  # bound once: a name of another module costs two look-ups more
_originals = {(owner, name): original for owner, name, original in obstacles._ORIGINALS}


_CALL, _DROPOUT = _originals[nn.Linear, "__call__"], _originals[F, "dropout"]


class _Known(NamedTuple):
    """A class of activations: its forward, the code of its row, and the functions of torch that it calls.

    A function is its own forward.
    """

    forward: Callable[..., Tensor]
    code: int
    functions: Tuple[Tuple[Any, str, Any], ...]


_known: Dict[Any, _Known] = {}  # those of torch.nn.GELU by its ``approximate``
# Classes of activations, and forwards of kernels that kernelize has put into their modules.
_kernels: Dict[Tuple[type, Callable[..., Tensor]], bool] = {}
# Classes of linear layers beside torch's: what has to be unchanged of each, and whether its weight is [in, out]; if
# not, they have no bias.
_linears: Dict[type, Tuple[Tuple[Tuple[Any, str, Any], ...], bool]] = {}
_OP_NAMES = ("linear", "mlp", "gated_linear", "gated_mlp", "residual_mlp", "residual_gated_mlp")
# Without what OpOverload does before this in Python.
_ops = {name: getattr(getattr(native, name), "_op", None) for name in _OP_NAMES}
_act_and_mul = getattr(native.act_and_mul, "_op", None)

# By name of an op that may take more time than its parts where autograd follows: the function that computes these.
_parts = {"linear": reference.linear}
if native.DEVICE_TYPE == "cpu":
    _parts.update({name: getattr(reference, name) for name in ("mlp", "gated_linear", "gated_mlp")})


def _composed(pattern: Pattern, operands: Tuple[Any, ...]) -> Optional[Tensor]:
    """An MLP part by part, given the operands of its op; None where its parts do not fit."""
    x, *given, code = operands
    weights, biases = given[: len(given) // 2], given[len(given) // 2 :]
    try:
        if not pattern.gated:
            return getattr(reference, pattern.op)(*operands)
        if pattern.packed:
            if weights[0].size(0) % 2 != 0:  # there are no halves
                return None
            weight, bias = (weights[1], biases[1]) if pattern.whole else (None, None)
            return reference.packed_gated(x, weights[0], weight, biases[0], bias, code, pattern.up_first, _product)
        if weights[0].size(0) != weights[1].size(0):
            return None
        hidden = _product(F.linear(x, weights[0], biases[0]), F.linear(x, weights[1], biases[1]), code)
        return F.linear(hidden, weights[2], biases[2]) if pattern.whole else hidden
    except RuntimeError:  # the long way says what is wrong with the operands
        return None


def _product(gate: Tensor, up: Tensor, code: int) -> Tensor:
    by_torch = gate.requires_grad or up.requires_grad or dispatch.is_small_product(gate)
    return (reference.act_and_mul if by_torch else _act_and_mul)(gate, up, code)


def known_by(act: Union[Act, str]) -> Union[Act, str]:
    """What compiled code knows an activation by: the table's function where a method is one, or spells it out."""
    if type(act) is not forms.Form and type(act) is not MethodType:
        return act
    row = forms.row_of(act)
    return act if row is None else row.function


# Functions that return something true where torch's dispatcher has more to do than to call an op. A future torch may
# lack one of them: all ops are called then.
try:
    _DISPATCHED = torch.autograd._profiler_enabled, torch._C._functorch.maybe_current_level
except AttributeError:
    _DISPATCHED = ()

plain = native.plain_modules  # None where nothing is compiled
if plain is not None:
    plain.configure(
        {
            "tensor": Tensor,
            "parameter": nn.Parameter,
            "linear": nn.Linear,
            "dropout": nn.Dropout,
            "identity": nn.Identity,
            "gelu": nn.GELU,
            "function": FunctionType,
            "builtin": BuiltinFunctionType,
            "method": MethodType,
            "module": nn.Module,
            "module_list": nn.ModuleList,
            "call": _CALL,
            "mark": FUSED,
            "known": _known,
            "known_by": known_by,
            "kernels": _kernels,
            "composites": recognition.COMPOSITES,
            "linears": _linears,
            "norms": norms.known,
            "ops": _ops,
            "dtypes": native._DTYPES,
            "float32": torch.float32,
            "on_device": f"is_{native.DEVICE_TYPE}",
            "refusal": native._cached_gpu_refusal if native.DEVICE_TYPE == "cuda" else None,
            "every_gpu": native.takes_every_gpu,
            "parts": {training.KEPT: _parts},
            "least_recorded": dispatch.LEAST_RECORDED,
            "least_work": dispatch.LEAST_WORK,
            "blocks": dispatch._open_blocks,
            "is_inference": torch.is_inference_mode_enabled,
            "autocast": (
                torch._C._is_any_autocast_enabled,
                torch.is_autocast_enabled,
                torch.get_autocast_dtype,
                native.DEVICE_TYPE,
            ),
            "composed": _composed,
            "quiet": (
                torch._C._len_torch_dispatch_stack,
                torch._C._get_tracing_state,
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
                (nn.Dropout, "forward", obstacles.unpatched(nn.Dropout, "forward", nn.modules.dropout)),
                (F, "dropout", _DROPOUT),
                (nn.Identity, "forward", obstacles.unpatched(nn.Identity, "forward", nn.modules.linear)),
            ),
            "exchange": getattr(Tensor, "__dlpack_c_exchange_api__", None) if _DISPATCHED else None,
            "is_negated": Tensor.is_neg,
            "empty_like": torch.empty_like,
            "dispatched": _DISPATCHED,
        }
    )

Act = Union[nn.Module, Callable[[Tensor], Tensor]]
# Scale, shift, whether the source has the scale on the left of its product, and whether it computes in float32.
Modulation = Optional[Tuple[Tensor, Optional[Tensor], bool, bool]]
_NO_ACTIVATION = get_activation("linear").function


def fused(
    pattern: Pattern,
    x: Tensor,
    projections: Tuple[Union[nn.Module, str], ...],
    act: Union[Act, str],
    between: Tuple[Union[forwards.Part, str], ...] = (),
    owner: Optional[nn.Module] = None,
    names: Tuple[str, ...] = (),
) -> Tensor:
    """``forwards.fused`` of what ``act`` computes, by the short way where there is one.

    Parts that are children of ``owner`` may be given by name; ``names`` are all of these. To read one as an attribute
    takes Python longer than the short way takes for all.
    """
    is_short = plain is not None and not is_traced()  # Dynamo cannot look into compiled code
    if is_short:
        found = plain.fused(pattern, x, projections, known_by(act), between, owner, names)
        if type(found) is tuple:
            found = recorded_or_packed(pattern, *found)
        if found is not None:
            return found
    if names:
        projections, act, between = read(owner, projections), read(owner, act), read(owner, between)
    if not pattern.gated and obstacles.is_foreign(projections[0]):  # there is nothing to fuse: all is called
        hidden = act(projections[0](x))
        return forwards.second_half(hidden, between, projections[-1]) if pattern.whole else hidden
    if is_short and between and pattern.whole and not forwards.passes(between, x, projections[-1]):
        hidden = fused(pattern.first_half, x, projections[:-1], act)
        return forwards.second_half(hidden, between, projections[-1])
    if is_short:  # for the next call
        _learn(act)
        learn_layers(projections)
    return forwards.fused(pattern, x, projections, forms.row_of(act), act, between)


def read(owner: Optional[nn.Module], part: Any) -> Any:
    """A part, or those in a tuple, of which names stand for attributes."""
    if type(part) is tuple:
        return tuple(read(owner, each) for each in part)
    if type(part) is not str:
        return part
    value = getattr(owner, part)
    return _NOTHING if value is None else value  # without a name, None stands for a part that there is none of


class _Nothing:
    """A part that is None: it raises what calling None does, when it is its turn to be called."""

    def __call__(self, *_: Any) -> Tensor:
        raise TypeError("'NoneType' object is not callable")


_NOTHING = _Nothing()


def block(
    pattern: Pattern,
    x: Tensor,
    projections: Tuple[Union[nn.Module, str], ...],
    act: Union[Act, str],
    between: Tuple[Union[forwards.Part, str], ...],
    behind: Tuple[Union[nn.Module, float, str], ...],
    factor: Any,
    residual: Tensor,
    order: Tuple[bool, bool, int],
    first: Union[nn.Module, str, None],
    last: Union[nn.Module, str, None],
    modulation: Modulation = None,
    wide: bool = False,
    owner: Optional[nn.Module] = None,
    names: Tuple[str, ...] = (),
) -> Tensor:
    """The block of an MLP, or of one layer: ``last(residual + behind(mlp(first(x))) * factor)``.

    A norm that is None does nothing. With a ``modulation``, ``first(x) * (1 + scale) + shift`` takes the place of
    ``first(x)``. ``wide``: product and sum are computed in float32, and cast to the dtype of the residual.

    One op where the short way is taken, whose result has adjacent rows. ``order``, as :class:`sites.Block` has it,
    decides how its parts lay out theirs. The factor is a number, or a scale of the features, as those of a modulation
    are: one for all rows, or for rows that follow each other.
    """
    if plain is not None:
        given = pattern, x, projections, known_by(act), between, behind, factor, residual, first, last, modulation
        found = plain.block(*given, wide, owner, names)
        if found is not None:
            return found
    behind, first, last = read(owner, behind), read(owner, first), read(owner, last)
    values = fused(pattern, normed(x, first, modulation), projections, act, between, owner, names)
    return around(values, behind, factor, residual, order, last, wide)


def normed(x: Tensor, norm: Optional[nn.Module], modulation: Modulation) -> Tensor:
    """What a block's MLP is given, part by part."""
    if modulation is None:
        return x if norm is None else norm(x)
    scale, shift, scale_first, wide = modulation
    values = norm(x.float() if wide else x)
    values = (1 + scale) * values if scale_first else values * (1 + scale)
    values = values if shift is None else values + shift
    return values.type_as(x) if wide else values


def ending(
    owner: nn.Module,
    x: Tensor,
    residual: Tensor,
    projections: Tuple[str],
    behind: Tuple[str, ...],
    last: str,
    names: Tuple[str, ...],
) -> Optional[Tensor]:
    """``last(behind(projection(x)) + residual)`` of parts of ``owner``, by name, in one op; None if none takes them."""
    given = forwards.LINEAR, x, projections, _NO_ACTIVATION, (), behind, 1.0, residual
    return None if plain is None else plain.block(*given, None, last, None, False, owner, names)


def packed_block(pattern: Pattern, operands: Tuple[Any, ...]) -> Optional[Tensor]:
    """The block of a gated MLP whose gate and up are halves of one projection; None if no op computes it."""
    x, gate_up, down, gate_up_bias, down_bias, *others = operands
    if gate_up.size(0) % 2 != 0:  # there are no halves
        return None
    weights, biases = halves(gate_up, pattern.up_first), halves(gate_up_bias, pattern.up_first)
    try:
        return _ops["residual_gated_mlp"](x, *weights, down, *biases, down_bias, *others)
    except RuntimeError:  # the long way says what is wrong with the operands, or broadcasts them
        return None


def around(
    values: Tensor,
    behind: Tuple[Union[nn.Module, float], ...],
    factor: Any,
    residual: Tensor,
    order: Tuple[bool, bool, int],
    last: Optional[nn.Module],
    wide: bool = False,
) -> Tensor:
    """What is behind an MLP, part by part."""
    residual_first, factor_first, before_factor = order
    values = _passed(values, behind[:before_factor])
    if wide:
        wanted, values, residual = residual, values.float(), residual.float()
    if type(factor) is not float or factor != 1.0:
        values = factor * values if factor_first else values * factor
    values = _passed(values, behind[before_factor:])
    values = residual + values if residual_first else values + residual
    if wide:
        return values.type_as(wanted)
    return values if last is None else last(values)


def _passed(values: Tensor, parts: Tuple[Union[nn.Module, float], ...]) -> Tensor:
    for part in parts:
        if callable(part):
            values = part(values)
        elif part or F.dropout is not _DROPOUT:
            values = F.dropout(values, part, True)
    return values


def recorded_or_packed(pattern: Pattern, x: Tensor, *given: Any) -> Optional[Tensor]:
    """The result, given the parameters of the projections and the code of the activation; None if no op computes it."""
    code, count = given[-1], len(given) // 2
    weights, biases, up_first = given[:count], given[count:-1], None
    # The operands of a pattern that is not packed come back only where autograd follows.
    recorded = not pattern.packed or (training.is_recording() and _needs_gradient(x, *given[:-1]))
    if pattern.packed:
        if weights[0].size(0) % 2 != 0:  # there are no halves
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
        if training.refusal(name, code) is not None:
            return reference.linear(x, *weights, *biases, code) if name == "linear" else None
        return training.run(name, (x, *weights, *biases), code, pattern.memory, up_first, is_quiet=True)
    except RuntimeError:  # the long way says what is wrong with the operands, or broadcasts them
        return None


def _needs_gradient(*given: Optional[Tensor]) -> bool:
    for tensor in given:  # noqa: SIM110 (a generator costs more than what it runs)
        if tensor is not None and tensor.requires_grad:
            return True
    return False


def learn_layers(projections: Tuple[nn.Module, ...]) -> None:
    """Takes the classes of linear layers beside torch's among those known."""
    for projection in projections:
        kind = type(projection)
        if kind not in _linears and obstacles.is_other_linear(projection) and obstacles.is_as_written(kind):
            addmm = torch, "addmm", _originals[torch, "addmm"]  # which Conv1D calls
            unchanged = (kind, "__call__", _CALL), (kind, "forward", kind.forward), addmm
            _linears[kind] = unchanged, obstacles.is_transposed(kind)


def _learn(act: Act) -> None:
    """Takes an activation that is a function, or the class of one, among those known, if the table names it and nobody
    has altered it; and the kernel that kernelize has put into it."""
    kind, own = type(act), None
    if kind in (FunctionType, BuiltinFunctionType):
        key, forward, row = act, act, recognition.named_function(act)
    elif isinstance(act, nn.Module):
        key, forward = kind if kind is not nn.GELU else act.approximate, getattr(kind, "forward", None)
        own = obstacles.own_method(act, "forward")
        if key in _known and (own in (None, forward) or (kind, own) in _kernels):
            return
        row = recognition.activation_of(act)
        if kind is not nn.GELU and kind not in recognition._classes:  # or read: it may call anything
            return
    else:
        return
    if row is None:
        return
    if own not in (None, forward):
        _kernels[kind, own] = True
    if key not in _known:  # another thread may be reading what is there
        functions = ((owner, name, _originals[owner, name]) for owner, name in recognition.FUNCTIONS_OF[row.name])
        _known[key] = _Known(forward, row.code, tuple(functions))


for _row in ACTIVATIONS:
    _learn(_row.function)
