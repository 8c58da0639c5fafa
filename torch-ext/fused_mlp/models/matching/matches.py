"""Matches in the source of a function that a single call of ``forwards`` can replace, and their parts."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import FrozenSet, Optional, Tuple, Union

from .pattern import Pattern
from .roles import Role


@dataclass(frozen=True)
class Act:
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

    @property
    def parts(self) -> Tuple[ast.expr, ...]:
        """The source expressions that it contains."""
        return (self.callee, *self.options, *(word.value for word in self.named))


@dataclass(frozen=True)
class Match:
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

    @property
    def parts(self) -> Tuple[ast.expr, ...]:
        return (*self.inputs, *self.projections, *self.act.parts, *self.between)


@dataclass(frozen=True)
class SplitMLP:
    """``second(first(x), *rest, **named)``: an MLP whose halves are two modules."""

    second: ast.expr
    first: ast.expr
    x: ast.expr
    rest: Tuple[ast.expr, ...]
    named: Tuple[ast.keyword, ...]
    read: FrozenSet[ast.Name]

    @property
    def parts(self) -> Tuple[ast.expr, ...]:
        """The source expressions that it contains."""
        return (self.second, self.first, self.x, *self.rest, *(word.value for word in self.named))


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
class Whole:
    """``module(x)``, for a module that is exactly one MLP."""

    module: ast.expr
    inputs: Tuple[ast.expr, ...]
    read: FrozenSet[ast.Name]

    @property
    def parts(self) -> Tuple[ast.expr, ...]:
        """The source expressions that it contains."""
        return (self.module, *self.inputs)


@dataclass(frozen=True)
class Modulation:
    """``norm(x) * (1 + scale) + shift`` in the source; the shift is optional.

    ``wide``: it is ``(norm(x.float()) * (1 + scale) + shift).type_as(x)``.
    """

    scale: ast.expr
    shift: Optional[ast.expr]
    wide: bool = False

    @property
    def parts(self) -> Tuple[ast.expr, ...]:
        """The source expressions that it contains."""
        return (self.scale,) if self.shift is None else (self.scale, self.shift)


@dataclass(frozen=True)
class Block:
    """``last(residual + ...(...(mlp(first(x))) * factor))`` of an MLP in one method. Only the sum is required.

    The residual is a name or a sum of names. ``modulation`` applies to the first norm. ``behind`` are the operations
    before the sum, as ``between`` are those before the last projection, and may include a norm or a scale. The match's
    own input is that of the first norm.
    ``wide``: the sum is ``(residual.float() + ...float() * factor).type_as(residual)``.
    """

    match: Union[Match, Whole]
    behind: Tuple[ast.expr, ...]
    factor: Optional[ast.expr]
    residual: ast.expr
    is_normed: bool
    first: Optional[ast.expr] = None
    last: Optional[ast.expr] = None
    modulation: Optional[Modulation] = None
    wide: bool = False

    @property
    def read(self) -> FrozenSet[ast.Name]:
        return self.match.read

    @property
    def parts(self) -> Tuple[ast.expr, ...]:
        """The source expressions that it contains."""
        others = (part for part in (self.factor, self.first, self.last) if part is not None)
        modulation = () if self.modulation is None else self.modulation.parts
        return (*self.match.parts, *self.behind, self.residual, *others, *modulation)


@dataclass(frozen=True)
class Turns:
    """``for module in modules: x = module(x)``, for modules that include MLPs."""

    modules: ast.expr
    x: ast.Name

    @property
    def parts(self) -> Tuple[ast.expr, ...]:
        """The source expressions that it contains."""
        return (self.modules, self.x)


AnyMatch = Union[Match, SplitMLP, Block, Turns]
