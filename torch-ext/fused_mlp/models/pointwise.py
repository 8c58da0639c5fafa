"""``act(gate) * up`` where the products of an MLP are not fused: one kernel, where that takes less time than two."""

from __future__ import annotations

from typing import Any, Callable, Optional

import torch
from torch import Tensor

from .. import calls, dispatch
from ..activations import Activation
from ..backends import reference
from . import forms, obstacles
from .forwards import parts_product


def pays(*values: Any) -> bool:
    """True if one kernel is faster for a product of this size; the last of the values is the gate."""
    gate = values[-1]
    if type(gate) is not Tensor or gate.layout is not torch.strided or dispatch.is_small_product(gate):
        return False
    recorded = gate.numel() if gate.requires_grad else None
    return dispatch.select("act_and_mul", gate, recorded) is not reference


def product(gate: Any, up: Any, act: Callable[[Tensor], Tensor], up_left: bool) -> Any:
    """``act(gate) * up``, or ``up * act(gate)`` where ``up_left``, of whatever can be multiplied."""
    activation = forms.row_of(act)
    if not _are_taken(gate, up, activation, act, up_left):
        return parts_product(gate, up, act, up_left)
    return calls.act_and_mul(gate, up, activation)


def product_or_parts(gate: Any, up: Any, act: Callable[[Tensor], Tensor], up_left: bool) -> Any:
    """:func:`product` where it pays, else its parts."""
    return (product if pays(gate) else parts_product)(gate, up, act, up_left)


def _are_taken(gate: Any, up: Any, activation: Optional[Activation], act: Any, up_left: bool) -> bool:
    if activation is None or getattr(act, "inplace", False):
        return False
    if obstacles.of_input(gate) is not None or obstacles.of_input(up) is not None:
        return False
    if not gate.dtype.is_floating_point or (gate.dtype, gate.device, gate.shape) != (up.dtype, up.device, up.shape):
        return False
    return not up_left or gate.stride() == up.stride()  # the product lies in memory as its left factor does
