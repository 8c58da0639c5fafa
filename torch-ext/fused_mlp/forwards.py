"""The forwards of fused MLP modules: how far to fuse is decided anew at each call from what the parts are then."""

from __future__ import annotations

from typing import Callable, Optional

from torch import Tensor, nn

from . import functional, obstacles
from .activations import Activation


def gated(
    x: Tensor,
    gate: nn.Module,
    up: nn.Module,
    down: nn.Module,
    activation: Optional[Activation],
    act: Optional[Callable[[Tensor], Tensor]],
) -> Tensor:
    """``down(act(gate(x)) * up(x))``, ``activation`` being the row of the table that ``act`` computes, if one does."""
    if activation is None:
        return down(act(gate(x)) * up(x))
    if obstacles.of_projection(gate) is not None or obstacles.of_projection(up) is not None:
        return down(functional.act_and_mul(gate(x), up(x), activation.name))
    gate_weight, up_weight = obstacles.weight_of(gate), obstacles.weight_of(up)
    if obstacles.of_projection(down) is not None:
        return down(functional.gated_linear(x, gate_weight, up_weight, gate.bias, up.bias, activation.name))
    return functional.gated_mlp(
        x, gate_weight, up_weight, obstacles.weight_of(down), gate.bias, up.bias, down.bias, activation.name
    )


def packed_gated(
    x: Tensor,
    gate_up: nn.Module,
    down: nn.Module,
    activation: Optional[Activation],
    act: Optional[Callable[[Tensor], Tensor]],
) -> Tensor:
    """``down(act(gate) * up)`` with ``gate, up = gate_up(x).chunk(2, -1)``."""
    if activation is None:
        gate, up = gate_up(x).chunk(2, dim=-1)
        return down(act(gate) * up)
    if obstacles.of_projection(gate_up) is not None:
        gate, up = gate_up(x).chunk(2, dim=-1)
        return down(functional.act_and_mul(gate, up, activation.name))
    gate_weight, up_weight = obstacles.weight_of(gate_up).chunk(2)
    gate_bias, up_bias = (None, None) if gate_up.bias is None else gate_up.bias.chunk(2)
    if obstacles.of_projection(down) is not None:
        return down(functional.gated_linear(x, gate_weight, up_weight, gate_bias, up_bias, activation.name))
    return functional.gated_mlp(
        x, gate_weight, up_weight, obstacles.weight_of(down), gate_bias, up_bias, down.bias, activation.name
    )


def plain(
    x: Tensor,
    fc1: nn.Module,
    fc2: nn.Module,
    activation: Optional[Activation],
    act: Optional[Callable[[Tensor], Tensor]],
) -> Tensor:
    """``fc2(act(fc1(x)))``."""
    if activation is None or obstacles.of_projection(fc1) is not None:
        return fc2((act or activation.function)(fc1(x)))
    if obstacles.of_projection(fc2) is not None:
        return fc2(functional.linear(x, obstacles.weight_of(fc1), fc1.bias, activation.name))
    return functional.mlp(x, obstacles.weight_of(fc1), obstacles.weight_of(fc2), fc1.bias, fc2.bias, activation.name)


def linear(
    x: Tensor,
    projection: nn.Module,
    activation: Optional[Activation],
    act: Optional[Callable[[Tensor], Tensor]],
) -> Tensor:
    """``act(projection(x))``."""
    if activation is None or obstacles.of_projection(projection) is not None:
        return (act or activation.function)(projection(x))
    return functional.linear(x, obstacles.weight_of(projection), projection.bias, activation.name)
