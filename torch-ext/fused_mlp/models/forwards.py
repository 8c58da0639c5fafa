"""The forwards of fused MLPs: how far to fuse is decided anew at each call from what the parts are then.

``activation`` is the row of the table that ``act`` computes, if one does. ``between`` are what the hidden values go
through before the last projection: dropout modules and their like, or probabilities of a dropout.
"""

from __future__ import annotations

from functools import partial
from typing import Callable, List, Optional, Sequence, Tuple, Union

import torch.nn.functional as F
from torch import Tensor, nn

from .. import functional
from ..activations import Activation
from . import obstacles, switching
from .recognition import activation_of

Act = Optional[Callable[[Tensor], Tensor]]
Between = Sequence[Union[nn.Module, float]]


def gated(
    x: Tensor,
    gate: nn.Module,
    up: nn.Module,
    down: nn.Module,
    activation: Optional[Activation],
    act: Act,
    between: Between = (),
) -> Tensor:
    """``down(act(gate(x)) * up(x))``."""
    found = _parameters(x, activation, gate, up, down) if _passes(between) else None
    if found is not None:
        (gate_weight, gate_bias), (up_weight, up_bias), (weight, bias) = found
        if gate_weight.size(0) == up_weight.size(0):  # else an output is broadcast
            return functional.gated_mlp(x, gate_weight, up_weight, weight, gate_bias, up_bias, bias, activation.name)
    return _last(gated_linear(x, gate, up, activation, act), between, down)


def gated_linear(x: Tensor, gate: nn.Module, up: nn.Module, activation: Optional[Activation], act: Act) -> Tensor:
    """``act(gate(x)) * up(x)``."""
    found = _parameters(x, activation, gate, up)
    if found is not None:
        (gate_weight, gate_bias), (up_weight, up_bias) = found
        if gate_weight.size(0) == up_weight.size(0):
            return functional.gated_linear(x, gate_weight, up_weight, gate_bias, up_bias, activation.name)
    return pointwise(gate(x), up(x), activation, act)


def packed_gated(
    x: Tensor,
    gate_up: nn.Module,
    down: nn.Module,
    activation: Optional[Activation],
    act: Act,
    between: Between = (),
    up_first: bool = False,
) -> Tensor:
    """``down(act(gate) * up)`` with ``gate, up = gate_up(x).chunk(2, -1)``, or the halves the other way round."""
    found = _parameters(x, activation, gate_up, down) if _passes(between) else None
    if found is None:
        return _last(packed_gated_linear(x, gate_up, activation, act, up_first), between, down)
    packed, (weight, bias) = found
    gate_weight, up_weight, gate_bias, up_bias = _halves(*packed, up_first)
    return functional.gated_mlp(x, gate_weight, up_weight, weight, gate_bias, up_bias, bias, activation.name)


def packed_gated_linear(
    x: Tensor, gate_up: nn.Module, activation: Optional[Activation], act: Act, up_first: bool = False
) -> Tensor:
    """``act(gate) * up`` with ``gate, up = gate_up(x).chunk(2, -1)``, or the halves the other way round."""
    found = _parameters(x, activation, gate_up)
    if found is not None:
        return functional.gated_linear(x, *_halves(*found[0], up_first), activation.name)
    gate, up = gate_up(x).chunk(2, dim=-1)
    return pointwise(up, gate, activation, act) if up_first else pointwise(gate, up, activation, act)


def plain(
    x: Tensor, fc1: nn.Module, fc2: nn.Module, activation: Optional[Activation], act: Act, between: Between = ()
) -> Tensor:
    """``fc2(act(fc1(x)))``."""
    found = _parameters(x, activation, fc1, fc2) if _passes(between) else None
    if found is None:
        return _last(linear(x, fc1, activation, act), between, fc2)
    (weight1, bias1), (weight2, bias2) = found
    return functional.mlp(x, weight1, weight2, bias1, bias2, activation.name)


def linear(x: Tensor, projection: nn.Module, activation: Optional[Activation], act: Act) -> Tensor:
    """``act(projection(x))``."""
    found = _parameters(x, activation, projection)
    if found is None:
        return (act or activation.function)(projection(x))
    return functional.linear(x, *found[0], activation.name)


def pointwise(gate: Tensor, up: Tensor, activation: Optional[Activation], act: Act) -> Tensor:
    """``act(gate) * up`` of whatever can be multiplied."""
    if activation is None or getattr(act, "inplace", False) or not _are_alike(gate, up):
        return (act or activation.function)(gate) * up
    return functional.act_and_mul(gate, up, activation.name)


def sequential(self: nn.Sequential, input: Tensor) -> Tensor:
    """The forward of ``nn.Sequential``, with what is an MLP among its parts fused."""
    instead = _instead_of_sequential(self)
    if instead is not None:
        return instead(self, input)
    if obstacles.of_surroundings() is not None:
        return nn.Sequential.forward(self, input)
    parts, index = list(self), 0
    while index < len(parts):
        first, act = parts[index], parts[index + 1] if index + 1 < len(parts) else None
        activation = None if act is None or obstacles.of_projection(first) is not None else activation_of(act)
        last = index + 2
        while last < len(parts) and _passes(parts[last : last + 1]):
            last += 1
        if activation is None:
            input, index = first(input), index + 1
        elif last < len(parts) and ends(parts[last:]):
            input, index = plain(input, first, parts[last], activation, act), last + 1
        else:
            input, index = linear(input, first, activation, act), index + 2
    return input


sequential.__name__ = "forward"  # the name under which a bound method is pickled
sequential.__wrapped__ = nn.Sequential.forward  # what torch.jit.script compiles
_instead_of_sequential = switching.instead_of("forward", nn.Sequential.forward, nn.Sequential.forward)


def ends(parts: Sequence[nn.Module]) -> bool:
    """Whether an MLP ends with the first part: a projection, without an activation to go with it."""
    return obstacles.of_projection(parts[0]) is None and (len(parts) == 1 or activation_of(parts[1]) is None)


def alteration(part: Union[nn.Module, float]) -> Optional[str]:
    """Why hidden values do not come out of a part as they go in; None if they do."""
    if not isinstance(part, nn.Module):
        return "active in training" if part else None
    kind = type(part)
    if kind is nn.Dropout:
        return "active in training" if part.training and part.p > 0.0 else obstacles.of_call(part)
    return obstacles.of_call(part) if kind is nn.Identity else f"a {kind.__name__}"


def _passes(between: Between) -> bool:
    for part in between:  # noqa: SIM110 (a generator costs more than what it runs)
        if alteration(part) is not None:
            return False
    return True


def _last(hidden: Tensor, between: Between, projection: nn.Module) -> Tensor:
    for part in between:
        hidden = part(hidden) if isinstance(part, nn.Module) else F.dropout(hidden, part, True)
    return projection(hidden)


def _parameters(
    x: Tensor, activation: Optional[Activation], *projections: nn.Module
) -> Optional[List[Tuple[Tensor, Optional[Tensor]]]]:
    """The weights and biases of the projections; None where something must be called instead."""
    if activation is None or obstacles.of_input(x) is not None:
        return None
    found = []
    for projection in projections:
        parameters = obstacles.parameters_of(projection)
        if isinstance(parameters, str):
            return None
        found.append(parameters)
    return found


def _are_alike(gate: Tensor, up: Tensor) -> bool:
    if not (isinstance(gate, Tensor) and isinstance(up, Tensor) and gate.dtype.is_floating_point):
        return False
    if obstacles.of_input(gate) is not None or obstacles.of_input(up) is not None:
        return False
    return gate.shape == up.shape and gate.dtype == up.dtype and gate.device == up.device


def _halves(weight: Tensor, bias: Optional[Tensor], up_first: bool) -> Tuple[Optional[Tensor], ...]:
    """The weights and the biases of gate and up, of a packed projection."""
    first, second = weight.chunk(2)
    first_bias, second_bias = (None, None) if bias is None else bias.chunk(2)
    return (second, first, second_bias, first_bias) if up_first else (first, second, first_bias, second_bias)


BY_PATTERN = {
    "linear": linear,
    "plain": plain,
    "gated linear": gated_linear,
    "gated": gated,
    "packed gated linear": packed_gated_linear,
    "packed gated": packed_gated,
    "packed gated linear, up first": partial(packed_gated_linear, up_first=True),
    "packed gated, up first": partial(packed_gated, up_first=True),
}
