"""The block of a layer (norm, MLP and sum with the residual) whose MLP is a separate module."""

from __future__ import annotations

from typing import Any, Optional, Tuple

from torch import Tensor, nn

from . import forwards, plans, sequences, shortcut, split_mlps

_plain = shortcut.plain
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
    """Run ``shortcut.block`` for a part that is an MLP."""
    if _plain is None:
        return None
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


def _whole_sequence(module: nn.Sequential) -> Optional[sequences.Whole]:
    """Return the MLP that a sequence is, if its call runs only its forward; None otherwise."""
    return None if type(split_mlps.running(module, _sequences)) is str else sequences.whole(module)
