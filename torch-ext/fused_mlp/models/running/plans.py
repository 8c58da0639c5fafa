"""Plans: what a fused call computes and of which parts, apart from the operands that a call gives it."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Optional, Tuple, Union

from ..matching.pattern import Pattern

Part = Union[str, int, None]  # the name of a child of the module, or the index of an operand of the call


class Plan(NamedTuple):
    """``act(...)`` of ``projections``, or the block ``last(residual + ...(mlp(first(x))) * factor)`` around that.

    Projections come in the order gate, up, down (``packed``: gate and up in one). ``between`` stands before the last
    of them, ``behind`` after it. ``module`` is one that is the MLP, in the place of projections and activation.

    ``wide``: product and sum of the block are computed in float32, and cast to the dtype of the residual;
    ``modulation_wide``: so is the modulation of the first norm. ``names`` are all parts that are known by name.

    Compiled code reads the fields by their places (torch-ext/calls/plain_modules.cpp).
    """

    pattern: Optional[Pattern]
    projections: Tuple[Part, ...]
    act: Part
    between: Tuple[Part, ...]
    module: Part
    behind: Tuple[Part, ...]
    first: Part
    last: Part
    wide: bool
    modulation_wide: bool
    names: Tuple[str, ...]


def made(
    pattern: Optional[Pattern],
    projections: Tuple[Part, ...] = (),
    act: Part = None,
    between: Tuple[Part, ...] = (),
    module: Part = None,
    behind: Tuple[Part, ...] = (),
    first: Part = None,
    last: Part = None,
    wide: bool = False,
    modulation_wide: bool = False,
) -> Plan:
    parts = (*projections, act, *between, module, *behind, first, last)
    names = tuple(dict.fromkeys(part for part in parts if isinstance(part, str)))
    return Plan(pattern, projections, act, between, module, behind, first, last, wide, modulation_wide, names)


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
    """The plan whose parts are all operands: projections, the activation, what is between, what is behind, and the
    norms, if there are some ``around``, first and last."""
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
    """A part, or those in a tuple."""
    if type(part) is tuple:
        return tuple(part_of(owner, each, operands) for each in part)
    if type(part) is int:
        return operands[part]
    return getattr(owner, part) if type(part) is str else part
