"""The forwards of fused MLPs: how far to fuse is decided anew at each call from what the parts are then.

``activation`` is the row of the table that ``act`` computes, if one does. ``between`` are what the hidden values go
through before the last projection: dropout modules and their like, or probabilities of a dropout.
"""

from __future__ import annotations

from functools import partial
from typing import Callable, List, Optional, Sequence, Tuple, Union

import torch.nn.functional as F
from torch import Tensor, nn

from . import functional, obstacles
from .activations import Activation, activation_of

FUSED = "_fused_mlp"  # the attribute of a module whose methods are fused, which restore() takes away

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
    if _are_plain(x, activation, gate, up, down) and _passes(between):
        weights, biases = _parameters(gate, up, down)
        if weights[0].size(0) == weights[1].size(0):  # else an output is broadcast
            return functional.gated_mlp(x, *weights, *biases, activation.name)
    return _last(gated_linear(x, gate, up, activation, act), between, down)


def gated_linear(x: Tensor, gate: nn.Module, up: nn.Module, activation: Optional[Activation], act: Act) -> Tensor:
    """``act(gate(x)) * up(x)``."""
    if _are_plain(x, activation, gate, up):
        weights, biases = _parameters(gate, up)
        if weights[0].size(0) == weights[1].size(0):
            return functional.gated_linear(x, *weights, *biases, activation.name)
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
    if not (_are_plain(x, activation, gate_up, down) and _passes(between)):
        return _last(packed_gated_linear(x, gate_up, activation, act, up_first), between, down)
    gate, up, gate_bias, up_bias = _halves(gate_up, up_first)
    (last,), (bias,) = _parameters(down)
    return functional.gated_mlp(x, gate, up, last, gate_bias, up_bias, bias, activation.name)


def packed_gated_linear(
    x: Tensor, gate_up: nn.Module, activation: Optional[Activation], act: Act, up_first: bool = False
) -> Tensor:
    """``act(gate) * up`` with ``gate, up = gate_up(x).chunk(2, -1)``, or the halves the other way round."""
    if _are_plain(x, activation, gate_up):
        return functional.gated_linear(x, *_halves(gate_up, up_first), activation.name)
    gate, up = gate_up(x).chunk(2, dim=-1)
    return pointwise(up, gate, activation, act) if up_first else pointwise(gate, up, activation, act)


def plain(
    x: Tensor, fc1: nn.Module, fc2: nn.Module, activation: Optional[Activation], act: Act, between: Between = ()
) -> Tensor:
    """``fc2(act(fc1(x)))``."""
    if not (_are_plain(x, activation, fc1, fc2) and _passes(between)):
        return _last(linear(x, fc1, activation, act), between, fc2)
    weights, biases = _parameters(fc1, fc2)
    return functional.mlp(x, *weights, *biases, activation.name)


def linear(x: Tensor, projection: nn.Module, activation: Optional[Activation], act: Act) -> Tensor:
    """``act(projection(x))``."""
    if not _are_plain(x, activation, projection):
        return (act or activation.function)(projection(x))
    (weight,), (bias,) = _parameters(projection)
    return functional.linear(x, weight, bias, activation.name)


def pointwise(gate: Tensor, up: Tensor, activation: Optional[Activation], act: Act) -> Tensor:
    """``act(gate) * up`` of whatever can be multiplied."""
    if activation is None or getattr(act, "inplace", False) or not _are_alike(gate, up):
        return (act or activation.function)(gate) * up
    return functional.act_and_mul(gate, up, activation.name)


def sequential(self: nn.Sequential, input: Tensor) -> Tensor:
    """The forward of ``nn.Sequential``, with what is an MLP among its parts fused."""
    if not getattr(self, FUSED, False):  # restored while somebody's wrapper holds this forward
        return type(self).forward(self, input)
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


def _are_plain(x: Tensor, activation: Optional[Activation], *projections: nn.Module) -> bool:
    if activation is None or obstacles.of_input(x) is not None:
        return False
    for projection in projections:  # noqa: SIM110
        if obstacles.of_projection(projection) is not None:
            return False
    return True


def _parameters(*projections: nn.Module) -> Tuple[List[Tensor], List[Optional[Tensor]]]:
    """The weights and the biases of plain projections."""
    return [obstacles.weight_of(each) for each in projections], [obstacles.bias_of(each) for each in projections]


def _are_alike(gate: Tensor, up: Tensor) -> bool:
    if not (isinstance(gate, Tensor) and isinstance(up, Tensor) and gate.dtype.is_floating_point):
        return False
    if obstacles.of_input(gate) is not None or obstacles.of_input(up) is not None:
        return False
    return gate.shape == up.shape and gate.dtype == up.dtype and gate.device == up.device


def _halves(gate_up: nn.Module, up_first: bool) -> Tuple[Optional[Tensor], ...]:
    """The weights and the biases of gate and up."""
    (weight,), (bias,) = _parameters(gate_up)
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
