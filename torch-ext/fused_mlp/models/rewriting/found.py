"""The current parts of a module that a rewritten method fuses."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any, Callable, Dict, List, Optional, Tuple

from torch import Tensor, nn

from ...activations import Activation
from ..matching.matches import Act, AnySite, Block, Joint, Whole
from ..matching.pattern import Pattern
from ..parts import forms
from ..reading.source import value_of, values_of
from ..running import forwards, split_mlps
from .fused_calls import NAMES, expression_of


@dataclass(frozen=True)
class FoundMLP:
    """An MLP of a module, or what there is of one: its parts as they are now, by the names they have there.

    ``halves`` are the two modules that hold the parts, if the module itself does not; each with what keeps its call
    from being skipped, or None. ``around`` says what else of its block is in the call. ``aside`` is what keeps the
    method from the branch that the MLP is in, as source, if something does now.
    """

    pattern: Pattern
    projections: Dict[str, nn.Module]
    act: Optional[Callable]
    between: Dict[str, Any]
    halves: Dict[str, Optional[str]] = field(default_factory=dict)
    around: str = ""
    aside: Optional[str] = None

    @property
    def activation(self) -> Optional[Activation]:
        """The row of the table that the activation computes now, or None."""
        return None if self.act is None else forms.row_of(self.act)


def mlps_of(site: AnySite, function: FunctionType, module: nn.Module) -> List[FoundMLP]:
    """The MLPs that a site of a method is: several in a loop, none that is another module's own."""
    if isinstance(site, Joint):
        return _mlps_across(site, function, module)
    around = ""
    if isinstance(site, Block):
        around, site = around_of(True, site.is_normed), site.site
    if isinstance(site, Whole):
        return []
    act = act_of(site.act, function, module)
    between = {_name(node): _between(node, function, module) for node in site.between}
    projections = [list(values_of(node, function, module).items()) for node in site.projections]
    turns = range(max(map(len, projections), default=1))  # the turns of a loop
    now = [dict(parts[min(turn, len(parts) - 1)] for parts in projections) for turn in turns]
    return [FoundMLP(site.pattern, parts, act, between, around=around) for parts in now]


def around_of(is_summed: bool, is_normed: bool) -> str:
    """The suffix of a pattern's name for the residual and the norm in the same call."""
    return (" with residual and norm" if is_normed else " with residual") if is_summed else ""


def _mlps_across(joint: Joint, function: FunctionType, module: nn.Module) -> List[FoundMLP]:
    """The MLPs that pairs of modules hold, which a method calls one after the other."""
    pairs = [list(values_of(node, function, module).items()) for node in (joint.head, joint.tail)]
    turns = range(max(map(len, pairs)) if all(pairs) else 0)  # the turns of a loop
    return [_mlp_across(*(parts[min(turn, len(parts) - 1)] for parts in pairs)) for turn in turns]


def _mlp_across(named_head: Tuple[str, Any], named_tail: Tuple[str, Any]) -> FoundMLP:
    (head_name, head), (tail_name, tail) = named_head, named_tail
    first, last = split_mlps.running(head, split_mlps.heads), split_mlps.running(tail, split_mlps.tails)
    words = {head_name: first, tail_name: last}
    words = {name: known if isinstance(known, str) else None for name, known in words.items()}
    if any(words.values()):
        return FoundMLP(forwards.PLAIN, {}, None, {}, words)
    start = last.found
    named = values_of(start.projection, last.forward, tail).items()
    projections = {f"{tail_name}.{path}": part for path, part in named}
    between = {f"{tail_name}.{_name(node)}": _between(node, last.forward, tail) for node in start.between}
    around = around_of(last.ending is not None, bool(last.ending))
    return replace(mlp_behind(head_name, head, between, projections), halves=words, around=around)


def mlp_behind(name: str, head: nn.Module, between: Dict[str, Any], projection: Dict[str, Any]) -> FoundMLP:
    """The MLP of a head and the projection that follows it."""
    half = split_mlps.running(head, split_mlps.heads)
    if isinstance(half, str):
        return FoundMLP(forwards.PLAIN, {}, None, {}, {name: half})
    site, projections = half.found, {}
    for node in site.projections:
        named = values_of(node, half.forward, head).items()
        projections.update({f"{name}.{path}": part for path, part in named})
    act, pattern = act_of(site.act, half.forward, head), replace(site.pattern, whole=True)
    return FoundMLP(pattern, {**projections, **projection}, act, between, {name: None})


def act_of(act: Act, function: FunctionType, module: nn.Module) -> Callable[[Tensor], Tensor]:
    """The activation of a site as it is now."""
    return _evaluated(expression_of(act), function, module)


def _evaluated(node: ast.expr, function: FunctionType, module: nn.Module) -> Any:
    """The value of an expression made by :func:`expression_of`. (A nested function would hold the module.)"""
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
