"""``act(gate) * up`` if an MLP's GEMMs are not fused: one kernel, where that is faster than two."""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import Tensor

from ... import calls, dispatch
from ...backends import reference
from ..parts import forms, refusals

is_traced = torch._C._is_tracing  # sizes are tensors then


def pays(act: Callable[[Tensor], Tensor], *values: Any) -> bool:
    """True if one kernel is faster for a product of this size; the last of ``values`` is the gate."""
    gate = values[-1]
    if type(gate) is not Tensor or is_traced() or dispatch.is_small_product(gate):
        return False
    if forms.row_of(act) is None or getattr(act, "inplace", False) or forms.is_widened(act, gate):
        return False
    if dispatch.select("act_and_mul", gate, gate.numel() if gate.requires_grad else None) is reference:
        return False
    return refusals.of_input(gate) is None


def product(gate: Tensor, up: Any, act: Callable[[Tensor], Tensor], up_left: bool) -> Any:
    """Return ``act(gate) * up``, or ``up * act(gate)`` if ``up_left``, by one kernel if ``up`` matches the gate."""
    if not _are_alike(gate, up, up_left):
        return up * act(gate) if up_left else act(gate) * up
    return calls.act_and_mul(gate, up, forms.row_of(act))


def _are_alike(gate: Tensor, up: Any, up_left: bool) -> bool:
    if type(up) is not Tensor or up.layout is not torch.strided:
        return False
    if (gate.dtype, gate.device, gate.shape) != (up.dtype, up.device, up.shape):
        return False
    return not up_left or gate.stride() == up.stride()  # the product has the strides of its left factor
