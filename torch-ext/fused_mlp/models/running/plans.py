"""Plans: what a fused call computes and from which parts, without the operands of a particular call."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Optional, Tuple, Union

from ..matching.pattern import Pattern

Part = Union[str, int, None]  # name of a child of the module, or index of an operand of the call


class Plan(NamedTuple):
    """``act(...)`` of ``projections``, or the block ``last(residual + ...(mlp(first(x))) * factor)`` around it.

    Projections are in the order gate, up, down (``packed``: gate and up in one). ``between`` precedes the last of them,
    ``behind`` follows it. ``module`` is a module that is the whole MLP, instead of projections and activation.

    ``wide`` means that the block's product and sum are computed in float32 and cast to the residual's dtype;
    ``modulation_wide``, that the modulation of the first norm is too. ``names`` lists all parts given by name.

    Compiled code reads the fields by position (torch-ext/calls/plain_modules.cpp).
    """

    pattern: Optional[Pattern]
    projections: Tuple[Part, ...] = ()
    act: Part = None
    between: Tuple[Part, ...] = ()
    module: Part = None
    behind: Tuple[Part, ...] = ()
    first: Part = None
    last: Part = None
    wide: bool = False
    modulation_wide: bool = False
    names: Tuple[str, ...] = ()


def made(*fields: Any, **named: Any) -> Plan:
    """Return the plan with these fields; its names follow from them."""
    plan = Plan(*fields, **named)
    parts = (*plan.projections, plan.act, *plan.between, plan.module, *plan.behind, plan.first, plan.last)
    return plan._replace(names=tuple(dict.fromkeys(part for part in parts if isinstance(part, str))))


@functools.cache
def of_operands(
    pattern: Pattern,
    projections: int,
    between: int,
    behind: int = 0,
    around: Tuple[bool, bool] = (False, False),
    wide: bool = False,
    modulation_wide: bool = False,
) -> Plan:
    """Return the plan whose parts are all operands: projections, activation, the parts between, the parts after, and,
    as ``around`` says, the first and the last norm."""
    indices = iter(range(projections + 1 + between + behind + sum(around)))

    def take(count: int) -> Tuple[int, ...]:
        return tuple(next(indices) for _ in range(count))

    return made(
        pattern,
        take(projections),
        next(indices),
        take(between),
        None,
        take(behind),
        *(next(indices) if is_there else None for is_there in around),
        wide,
        modulation_wide,
    )


def part_of(owner: Any, part: Any, operands: Tuple[Any, ...]) -> Any:
    """Return a part, or a tuple of the parts in a tuple."""
    if type(part) is tuple:
        return tuple(part_of(owner, each, operands) for each in part)
    if type(part) is int:
        return operands[part]
    return getattr(owner, part) if type(part) is str else part
