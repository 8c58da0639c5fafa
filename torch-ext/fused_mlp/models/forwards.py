"""The forwards of fused MLPs: how far to fuse is decided anew at each call from what the parts are then.

``activation`` is the row of the table that ``act`` computes, if one does. ``between`` are what the hidden values go
through before the last projection: dropout modules and their like, probabilities of a dropout, or functions that cast
them to the dtype of its weight, as :func:`cast` does.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any, Callable, List, Optional, Sequence, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import calls
from ..activations import Activation
from . import obstacles
from .attributes import attribute_of
from .pattern import Pattern

LINEAR, PLAIN = Pattern(), Pattern(whole=True)
GATED, PACKED_GATED = Pattern(gated=True, whole=True), Pattern(gated=True, whole=True, packed=True)

Act = Callable[[Tensor], Tensor]
Part = Union[nn.Module, float, FunctionType]
Between = Sequence[Part]
Parameters = List[Tuple[Tensor, Optional[Tensor]]]


def fused(
    pattern: Pattern,
    x: Tensor,
    projections: Sequence[nn.Module],
    activation: Optional[Activation],
    act: Act,
    between: Between = (),
) -> Tensor:
    """What ``pattern`` says, of projections in the order gate, up, down (``packed``: gate and up in one)."""
    if activation is not None and obstacles.of_input(x) is not None:
        activation = None  # nothing is fused: all is called
    found = None if activation is None else _parameters(projections)
    if not pattern.whole:
        return _hidden(pattern, x, projections, found, activation, act)
    if found is not None and passes(between, x, projections[-1]):
        if not pattern.gated:
            (first_weight, first_bias), (weight, bias) = found
            return calls.mlp(x, first_weight, weight, first_bias, bias, activation, pattern.memory)
        hidden = _gated(pattern, x, found[:-1], activation, *found[-1])
        if hidden is not None:
            return hidden
    *others, last = projections
    found = None if activation is None else _parameters(others)
    return second_half(_hidden(pattern, x, others, found, activation, act), between, last)


def _hidden(
    pattern: Pattern,
    x: Tensor,
    projections: Sequence[nn.Module],
    found: Optional[Parameters],
    activation: Optional[Activation],
    act: Act,
) -> Tensor:
    """What goes into the last projection. What is called is called in the order of the source."""
    if not pattern.gated:
        if found is not None:
            return calls.linear(x, *found[0], activation)
        return act(projections[0](x))
    hidden = None if found is None else _gated(pattern, x, found, activation)
    if hidden is not None:
        return hidden
    if pattern.packed:
        if getattr(act, "halves", False):
            return act(projections[0](x))
        first, second = projections[0](x).chunk(2, dim=-1)
        gate, up = (second, first) if pattern.up_first else (first, second)
        return pointwise(gate, up, activation, act)
    call_gate, call_up = projections
    if pattern.up_first:
        up = call_up(x)
        return pointwise(call_gate(x), up, activation, act, pattern.up_left)
    gate = call_gate(x)
    if not pattern.act_last and _is_called(activation, act):
        activated, up = act(gate), call_up(x)
        return up * activated if pattern.up_left else activated * up
    return pointwise(gate, call_up(x), activation, act, pattern.up_left)


def pointwise(gate: Tensor, up: Tensor, activation: Optional[Activation], act: Act, up_left: bool = False) -> Tensor:
    """``act(gate) * up`` of whatever can be multiplied, or ``up * act(gate)``."""
    called = _is_called(activation, act) or not _are_alike(gate, up)
    if called or (up_left and gate.stride() != up.stride()):  # the product lies in memory as its left factor does
        activated = act(gate)
        return up * activated if up_left else activated * up
    return calls.act_and_mul(gate, up, activation)


# The forwards of what hands on what comes in, or None where somebody has patched them.
_PASSING = {
    nn.Dropout: obstacles.unpatched(nn.Dropout, "forward", nn.modules.dropout),
    nn.Identity: obstacles.unpatched(nn.Identity, "forward", nn.modules.linear),
}


def cast(hidden: Tensor) -> Tensor:
    """Stands for a cast of a module's code, among what is between its projections; nothing calls it."""
    raise NotImplementedError


def alteration(part: Part, dtype: Any = None, projection: Any = None) -> Optional[str]:
    """Why hidden values of a dtype do not come out of a part before a projection as they go in; None if they do."""
    if isinstance(part, FunctionType):
        if torch._C._is_any_autocast_enabled():
            return "in autocast"
        wanted = dtype_of(projection)
        return None if wanted is dtype else f"from {dtype} to {wanted}"
    if part is None:
        return "None, which cannot be called"
    if not isinstance(part, nn.Module):
        return "active in training" if part else None
    kind = type(part)
    if kind not in _PASSING:
        return f"a {kind.__name__}"
    if kind.forward is not _PASSING[kind] or kind.__call__ is not nn.Linear.__call__:
        return f"a patched {kind.__name__}"
    return "active in training" if kind is nn.Dropout and part.training and part.p > 0.0 else obstacles.of_call(part)


def dtype_of(projection: Any) -> Optional[torch.dtype]:
    """The dtype of a weight that a module holds; one that is computed is not asked for, as that may change it."""
    weight = attribute_of(projection, "weight") if isinstance(projection, nn.Module) else None
    return weight.dtype if isinstance(weight, Tensor) else None


def passes(between: Between, x: Any = None, projection: Any = None) -> bool:
    """Whether hidden values, of the dtype of x, come out of all these parts before a projection as they go in."""
    for part in between:  # noqa: SIM110 (a generator costs more than what it runs)
        if alteration(part, getattr(x, "dtype", None), projection) is not None:
            return False
    return True


def second_half(hidden: Tensor, between: Between, projection: nn.Module) -> Tensor:
    """What the last projection gives of hidden values, behind the parts between."""
    for part in between:
        hidden = part(hidden) if callable(part) else F.dropout(hidden, part, True)
    return projection(hidden)


def _parameters(projections: Sequence[nn.Module]) -> Optional[Parameters]:
    """The weights and biases of the projections; None where one must be called instead."""
    found = []
    for projection in projections:
        parameters = obstacles.parameters_of(projection)
        if type(parameters) is str:
            return None
        found.append(parameters)
    return found


def _is_called(activation: Optional[Activation], act: Act) -> bool:
    """Whether the activation must be called as it is: it is not known, or changes what it is given."""
    return activation is None or getattr(act, "inplace", False)


def _are_alike(gate: Tensor, up: Tensor) -> bool:
    if not (isinstance(gate, Tensor) and isinstance(up, Tensor) and gate.dtype.is_floating_point):
        return False
    if obstacles.of_input(gate) is not None or obstacles.of_input(up) is not None:
        return False
    return gate.shape == up.shape and gate.dtype == up.dtype and gate.device == up.device


def _gated(
    pattern: Pattern,
    x: Tensor,
    found: Parameters,
    activation: Activation,
    last_weight: Optional[Tensor] = None,
    last_bias: Optional[Tensor] = None,
) -> Optional[Tensor]:
    """A gated MLP, or without a last weight its first half; None where one output would be broadcast to the other."""
    if pattern.packed:
        ((weight, bias),) = found
        if weight.size(0) % 2 != 0:
            return None
        return calls.packed_gated(x, weight, last_weight, bias, last_bias, activation, pattern.up_first, pattern.memory)
    (gate_weight, gate_bias), (up_weight, up_bias) = found
    if gate_weight.size(0) != up_weight.size(0):
        return None
    if last_weight is None:
        return calls.gated_linear(x, gate_weight, up_weight, gate_bias, up_bias, activation, pattern.memory)
    operands = (x, gate_weight, up_weight, last_weight, gate_bias, up_bias, last_bias)
    return calls.gated_mlp(*operands, activation, pattern.memory)
