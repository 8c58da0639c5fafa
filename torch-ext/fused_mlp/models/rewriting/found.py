"""The current parts of a module that a rewritten method fuses."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any, Callable, Dict, List, Optional, Tuple

from torch import Tensor, nn

from ...activations import Activation
from ..matching.matches import Act, AnyMatch, Block, SplitMLP, Whole
from ..matching.pattern import Pattern
from ..parts import forms
from ..reading.source import value_of, values_of
from ..running import forwards, split_mlps
from .fused_calls import NAMES, expression_of


@dataclass(frozen=True)
class FoundMLP:
    """An MLP of a module, possibly incomplete: its current parts, by their names in the module.

    ``split`` are the two modules that hold the parts, if the module itself does not; each with the reason why its call
    cannot be skipped, or None. ``around`` says which other parts of its block the call includes. ``aside`` is the
    source of the condition that currently keeps the method out of the MLP's branch, if any.
    """

    pattern: Pattern
    projections: Dict[str, nn.Module]
    act: Optional[Callable]
    between: Dict[str, Any]
    split: Dict[str, Optional[str]] = field(default_factory=dict)
    around: str = ""
    aside: Optional[str] = None

    @property
    def activation(self) -> Optional[Activation]:
        """The row of the table that the activation currently computes, or None."""
        return None if self.act is None else forms.row_of(self.act)


def mlps_of(match: AnyMatch, function: FunctionType, module: nn.Module) -> List[FoundMLP]:
    """Return the MLPs of a match in a method: several in a loop, none if the MLP belongs to another module."""
    if isinstance(match, SplitMLP):
        return _mlps_across(match, function, module)
    around = ""
    if isinstance(match, Block):
        around, match = around_of(True, match.is_normed), match.match
    if isinstance(match, Whole):
        return []
    act = act_of(match.act, function, module)
    between = {_name(node): _between(node, function, module) for node in match.between}
    projections = [list(values_of(node, function, module).items()) for node in match.projections]
    turns = range(max(map(len, projections), default=1))  # iterations of a loop
    now = [dict(parts[min(turn, len(parts) - 1)] for parts in projections) for turn in turns]
    return [FoundMLP(match.pattern, parts, act, between, around=around) for parts in now]


def around_of(is_summed: bool, is_normed: bool) -> str:
    """Return the suffix of a pattern's name for the residual and the norm in the same call."""
    return (" with residual and norm" if is_normed else " with residual") if is_summed else ""


def _mlps_across(split: SplitMLP, function: FunctionType, module: nn.Module) -> List[FoundMLP]:
    """Return the MLPs held by pairs of modules that a method calls one after the other."""
    pairs = [list(values_of(node, function, module).items()) for node in (split.first, split.second)]
    turns = range(max(map(len, pairs)) if all(pairs) else 0)  # iterations of a loop
    return [_mlp_across(*(parts[min(turn, len(parts) - 1)] for parts in pairs)) for turn in turns]


def _mlp_across(named_first: Tuple[str, Any], named_second: Tuple[str, Any]) -> FoundMLP:
    (first_name, first), (second_name, second) = named_first, named_second
    front, back = split_mlps.running(first, split_mlps.firsts), split_mlps.running(second, split_mlps.seconds)
    words = {first_name: front, second_name: back}
    words = {name: known if isinstance(known, str) else None for name, known in words.items()}
    if any(words.values()):
        return FoundMLP(forwards.PLAIN, {}, None, {}, words)
    start = back.found
    named = values_of(start.projection, back.forward, second).items()
    projections = {f"{second_name}.{path}": part for path, part in named}
    between = {f"{second_name}.{_name(node)}": _between(node, back.forward, second) for node in start.between}
    around = around_of(back.ending is not None, bool(back.ending))
    return replace(mlp_behind(first_name, first, between, projections), split=words, around=around)


def mlp_behind(name: str, first: nn.Module, between: Dict[str, Any], projection: Dict[str, Any]) -> FoundMLP:
    """Return the MLP of a first module and the projection that follows it."""
    segment = split_mlps.running(first, split_mlps.firsts)
    if isinstance(segment, str):
        return FoundMLP(forwards.PLAIN, {}, None, {}, {name: segment})
    match, projections = segment.found, {}
    for node in match.projections:
        named = values_of(node, segment.forward, first).items()
        projections.update({f"{name}.{path}": part for path, part in named})
    act, pattern = act_of(match.act, segment.forward, first), replace(match.pattern, whole=True)
    return FoundMLP(pattern, {**projections, **projection}, act, between, {name: None})


def act_of(act: Act, function: FunctionType, module: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return the current activation of a match."""
    return _evaluated(expression_of(act), function, module)


def _evaluated(node: ast.expr, function: FunctionType, module: nn.Module) -> Any:
    """Return the value of an expression made by :func:`expression_of`. (A nested function would hold the module.)"""
    if not isinstance(node, ast.Call):
        found, *_ = values_of(node, function, module).values()
        return found
    named = {word.arg: _evaluated(word.value, function, module) for word in node.keywords}
    return NAMES[node.func.id](*(_evaluated(argument, function, module) for argument in node.args), **named)


def _between(node: ast.expr, function: FunctionType, module: nn.Module) -> Any:
    if isinstance(node, ast.Lambda):
        return forwards.cast
    if not isinstance(node, ast.IfExp):
        return value_of(node, function, module)
    return value_of(node.body, function, module) if value_of(node.test, function, module) else 0.0


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Lambda):
        return "cast"
    if isinstance(node, ast.IfExp):
        return "dropout"
    return ast.unparse(node).partition(".")[2]
