"""Matches in the source of a function that one call of ``forwards`` can replace, and their parts."""

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
        """The expressions of the source in it."""
        return (self.callee, *self.options, *(word.value for word in self.named))


@dataclass(frozen=True)
class Match:
    """One fused call; all parts are expressions of the source.

    ``between`` are what the hidden values go through before the last projection: modules, probabilities of dropout, or
    functions that cast them (``casts``).
    ``read`` are the names that were followed. The inputs of a pointwise match are gate and up.
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
        """The expressions of the source in it."""
        return (self.second, self.first, self.x, *self.rest, *(word.value for word in self.named))


@dataclass(frozen=True)
class Start:
    """The start of a method: ``projection(...(h))`` of its first argument, which nothing else reads."""

    node: ast.Call
    argument: ast.Name
    projection: ast.expr
    between: Tuple[ast.expr, ...]


@dataclass(frozen=True)
class Ending:
    """The end of a method: ``norm(...(h) + residual)`` of two values that it has, or the sum alone.

    ``behind`` are the modules that pass h on.
    """

    behind: Tuple[ast.expr, ...] = ()
    norm: Optional[ast.expr] = None


@dataclass(frozen=True)
class Whole:
    """``module(x)``, of a module that is an MLP and no more."""

    module: ast.expr
    inputs: Tuple[ast.expr, ...]
    read: FrozenSet[ast.Name]

    @property
    def parts(self) -> Tuple[ast.expr, ...]:
        """The expressions of the source in it."""
        return (self.module, *self.inputs)


@dataclass(frozen=True)
class Modulation:
    """``norm(x) * (1 + scale) + shift``, perhaps without a shift: what the source does to the result of a norm.

    ``wide``: that is ``(norm(x.float()) * (1 + scale) + shift).type_as(x)``.
    """

    scale: ast.expr
    shift: Optional[ast.expr]
    wide: bool = False

    @property
    def parts(self) -> Tuple[ast.expr, ...]:
        """The expressions of the source in it."""
        return (self.scale,) if self.shift is None else (self.scale, self.shift)


@dataclass(frozen=True)
class Block:
    """``last(residual + ...(...(mlp(first(x))) * factor))``, of which a sum must be there, of an MLP in one method.

    The residual is a name, or a sum of names. ``modulation`` is that of the first norm. ``behind`` is to the sum what
    ``between`` is to the last projection, and may have a norm or a scale in it. The match's own input is what the first
    norm is given. ``wide``: the sum is ``(residual.float() + ...float() * factor).type_as(residual)``.
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
        """The expressions of the source in it."""
        others = (part for part in (self.factor, self.first, self.last) if part is not None)
        modulation = () if self.modulation is None else self.modulation.parts
        return (*self.match.parts, *self.behind, self.residual, *others, *modulation)


@dataclass(frozen=True)
class Turns:
    """``for module in modules: x = module(x)``, of modules with MLPs among them."""

    modules: ast.expr
    x: ast.Name

    @property
    def parts(self) -> Tuple[ast.expr, ...]:
        """The expressions of the source in it."""
        return (self.modules, self.x)


AnyMatch = Union[Match, SplitMLP, Block, Turns]
