"""The block of a layer, a norm, an MLP and a sum with the residual, whose MLP is a module of its own."""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch
from torch import Tensor, nn

from ... import dispatch
from ...autograd import training
from . import forwards, plans, sequences, shortcut, split_mlps

_plain, _least_sum, _tracing_state = shortcut.plain, dispatch.LEAST_SUM.get, torch._C._get_tracing_state
_forward = nn.Sequential.forward
_sequences = dict.fromkeys((_forward, *sequences.SEQUENTIAL.values()), split_mlps.Segment(_forward, None, None, None))


def block(
    plan: plans.Plan,
    owner: Optional[nn.Module],
    x: Tensor,
    residual: Tensor,
    factor: Any = 1.0,
    modulation: shortcut.Modulation = None,
    operands: Tuple[Any, ...] = (),
) -> Optional[Tensor]:
    """``shortcut.block`` of a part that is an MLP."""
    if _plain is None:
        return None
    is_off = not shortcut.is_grad_enabled() and (owner is None or owner.training)
    if is_off and shortcut.is_as_recorded(owner, x, operands):
        return shortcut.recorded_block(block, plan, owner, x, residual, factor, modulation, operands)
    found = _plain.block_of(split_mlps.wholes, plan, owner, x, residual, factor, modulation, operands)
    if type(found) is tuple:
        found = shortcut.of_operands(*found)
    if found is not None:
        return None if found is False else found
    module = owner._modules.get(plan.module) if type(plan.module) is str else operands[plan.module]
    whole = _whole_sequence(module) if isinstance(module, nn.Sequential) else None
    if whole is None:
        return None
    projections, act, between, passing = whole
    behind, first, last = (plans.part_of(owner, part, operands) for part in (plan.behind, plan.first, plan.last))
    behind, around = (*passing, *behind), (first is not None, last is not None)
    counts = len(projections), len(between), len(behind)
    of_parts = plans.of_operands(forwards.PLAIN, *counts, around, plan.wide, plan.modulation_wide)
    norms = (norm for norm in (first, last) if norm is not None)
    given = (*projections, act, *between, *behind, *norms)
    return shortcut.block(of_parts, None, x, residual, factor, modulation, given)


def summed(
    plan: plans.Plan, owner: Optional[nn.Module], x: Tensor, residual: Tensor, operands: Tuple[Any, ...] = ()
) -> Optional[Tensor]:
    """The block of ``x + residual``, a norm, an MLP and a sum, as one node of autograd; None where it is none."""
    if _plain is None or _tracing_state() is not None:  # which warns of sizes that are compared
        return None
    is_sum = type(x) is type(residual) is Tensor and x.numel() >= _least_sum(x.dtype, 0)
    if not is_sum or x.shape != residual.shape or x.dtype is not residual.dtype or x.device != residual.device:
        return None
    if not shortcut.is_grad_enabled():
        is_off = (owner is None or owner.training) and shortcut.is_as_recorded(owner, x, operands)
        return training.as_recorded(lambda new: summed(plan, owner, new, residual, operands), x) if is_off else None
    if not x.requires_grad:
        return None
    given = plan, owner, x, x, 1.0, None, operands
    found = _plain.block(*given) if plan.module is None else _plain.block_of(split_mlps.wholes, *given)
    return shortcut.of_operands(*found, residual) if type(found) is tuple and len(found) == 3 else None


def _whole_sequence(module: nn.Sequential) -> Optional[sequences.Whole]:
    """The MLP that a sequence is, if its call runs its forward and nothing else; None otherwise."""
    return None if type(split_mlps.running(module, _sequences)) is str else sequences.whole(module)
