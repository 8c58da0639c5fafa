"""Matches in the source of a function that a single call of ``forwards`` can replace, and their parts."""

from __future__ import annotations

import ast
from dataclasses import dataclass, fields
from typing import FrozenSet, List, Optional, Tuple, Union

from .pattern import Pattern
from .roles import Role


class _Found:
    @property
    def parts(self) -> Tuple[ast.expr, ...]:
        """The source expressions in the fields, in their order; ``read`` is none of them."""
        found: List[ast.expr] = []
        for value in (getattr(self, each.name) for each in fields(self)):
            for part in value if isinstance(value, tuple) else (value,):
                part = part.value if isinstance(part, ast.keyword) else part
                found += part.parts if isinstance(part, _Found) else [part] if isinstance(part, ast.expr) else []
        return tuple(found)


@dataclass(frozen=True)
class Act(_Found):
    """The application of an activation to ``h`` in the source.

    ``form``: ``call`` is ``callee(h, *options, **named)``, ``factor`` is the activation in ``callee(h, up)``.
    """

    form: str
    role: str
    callee: ast.expr
    options: Tuple[ast.expr, ...] = ()
    named: Tuple[ast.keyword, ...] = ()

    @property
    def is_callee(self) -> bool:
        """True if the source calls the activation as a function of h alone."""
        return self.form == "call" and not self.options and not self.named and self.role != Role.BOUND


@dataclass(frozen=True)
class Match(_Found):
    """One fused call; all parts are expressions of the source.

    ``between`` are the operations on the hidden values before the last projection: modules, dropout probabilities, or
    functions that cast them (``casts``).
    ``read`` are the names that were resolved. The inputs of a pointwise match are gate and up.
    """

    pattern: Pattern
    inputs: Tuple[ast.expr, ...]
    projections: Tuple[ast.expr, ...]
    act: Act
    between: Tuple[ast.expr, ...] = ()
    read: FrozenSet[ast.Name] = frozenset()


@dataclass(frozen=True)
class SplitMLP(_Found):
    """``second(first(x), *rest, **named)``: an MLP whose halves are two modules."""

    second: ast.expr
    first: ast.expr
    x: ast.expr
    rest: Tuple[ast.expr, ...]
    named: Tuple[ast.keyword, ...]
    read: FrozenSet[ast.Name]


@dataclass(frozen=True)
class Start:
    """The start of a method: ``projection(...(h))`` of its first argument, which has no other reads."""

    node: ast.Call
    argument: ast.Name
    projection: ast.expr
    between: Tuple[ast.expr, ...]


@dataclass(frozen=True)
class Ending:
    """The end of a method: ``norm(...(h) + residual)`` of two of its values, or only the sum.

    ``behind`` are the modules that pass h on.
    """

    behind: Tuple[ast.expr, ...] = ()
    norm: Optional[ast.expr] = None


@dataclass(frozen=True)
class Whole(_Found):
    """``module(x)``, for a module that is exactly one MLP."""

    module: ast.expr
    inputs: Tuple[ast.expr, ...]
    read: FrozenSet[ast.Name]


@dataclass(frozen=True)
class Modulation(_Found):
    """``norm(x) * (1 + scale) + shift`` in the source; the shift is optional.

    ``wide``: it is ``(norm(x.float()) * (1 + scale) + shift).type_as(x)``.
    """

    scale: ast.expr
    shift: Optional[ast.expr]
    wide: bool = False


@dataclass(frozen=True)
class Block(_Found):
    """``last(residual + ...(...(mlp(first(x))) * factor))`` of an MLP in one method. Only the sum is required.

    The residual is a name or a sum of names. ``modulation`` applies to the first norm. ``behind`` are the operations
    before the sum, as ``between`` are those before the last projection, and may include a norm or a scale. The match's
    own input is that of the first norm.
    ``wide``: the sum is ``(residual.float() + ...float() * factor).type_as(residual)``.
    """

    match: Union[Match, Whole]
    behind: Tuple[ast.expr, ...]
    residual: ast.expr
    factor: Optional[ast.expr]
    is_normed: bool
    first: Optional[ast.expr] = None
    last: Optional[ast.expr] = None
    modulation: Optional[Modulation] = None
    wide: bool = False

    @property
    def read(self) -> FrozenSet[ast.Name]:
        return self.match.read


@dataclass(frozen=True)
class Turns(_Found):
    """``for module in modules: x = module(x)``, for modules that include MLPs."""

    modules: ast.expr
    x: ast.Name


AnyMatch = Union[Match, SplitMLP, Block, Turns]
