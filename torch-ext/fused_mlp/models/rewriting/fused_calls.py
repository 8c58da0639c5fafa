"""The expressions that replace matches, and the functions that they call."""

from __future__ import annotations

import ast
from dataclasses import replace
from types import FunctionType
from typing import Any, Dict, List, Optional, Sequence, Tuple

from ..matching.matches import Act, AnyMatch, Match, Modulation, SplitMLP, Turns, Whole
from ..matching.pattern import Pattern
from ..matching.roles import Role
from ..parts import forms
from ..running import blocks, plans, pointwise, sequences, shortcut, split_mlps
from ..running.plans import Part
from . import chunks

Names = Dict[str, Any]  # names of a rewritten method beside those in its source


def call_of(memory: str, function: FunctionType, match: AnyMatch, names: Names) -> ast.expr:
    """Return the call that replaces a match, and add its plan to ``names``. ``memory`` says what training keeps."""
    if isinstance(match, SplitMLP):
        return _split_mlp_of_children(memory, match)
    if isinstance(match, Turns):
        return made_call("in turn", ast.Constant(memory), match.modules, match.x)
    if isinstance(match, Match) and match.pattern.pointwise:
        return _product(match)
    parts = _Parts(function)
    if isinstance(match, Match):
        plan = plans.made(**parts.of_mlp(match, memory))
        return made_call("fused", parts.known(plan, names), parts.module(), *match.inputs, parts.operands())
    computed = match.match
    of_mlp = {"module": parts.of(computed.module)} if isinstance(computed, Whole) else parts.of_mlp(computed, memory)
    plan = plans.made(
        **{"pattern": None, **of_mlp},
        behind=parts.all_of(match.behind),
        first=parts.of(match.first),
        last=parts.of(match.last),
        wide=match.wide,
        modulation_wide=match.modulation is not None and match.modulation.wide,
    )
    given = *computed.inputs, match.residual, match.factor or ast.Constant(1.0), _modulation(match.modulation)
    name = "block of a module" if isinstance(computed, Whole) else "block"
    return made_call(name, parts.known(plan, names), parts.module(), *given, parts.operands())


class _Parts:
    """The parts of a plan: children of the method's first argument by name, others as operands of the call."""

    def __init__(self, function: FunctionType) -> None:
        self._owner = function.__code__.co_varnames[0]
        self._operands: List[ast.expr] = []
        self._is_named = False

    def of(self, node: Optional[ast.expr], by_name: bool = True) -> Part:
        if node is None:
            return None
        if by_name and isinstance(node, ast.Attribute) and ast.unparse(node.value) == self._owner:
            self._is_named = True
            return node.attr
        self._operands.append(node)
        return len(self._operands) - 1

    def all_of(self, nodes: Sequence[ast.expr]) -> Tuple[Part, ...]:
        return tuple(map(self.of, nodes))

    def of_mlp(self, match: Match, memory: str) -> Dict[str, Any]:
        return {
            "pattern": replace(match.pattern, memory=memory),
            "projections": self.all_of(match.projections),
            "act": self.of(expression_of(match.act), match.act.role != Role.BOUND),  # look-ups by name find no method
            "between": self.all_of(match.between),
        }

    def module(self) -> ast.expr:
        return ast.Name(self._owner, ast.Load()) if self._is_named else ast.Constant(None)

    def operands(self) -> ast.expr:
        return ast.Tuple(self._operands, ast.Load())

    @staticmethod
    def known(plan: plans.Plan, names: Names) -> ast.expr:
        name = f"@{plan!r}"
        names[name] = plan
        return ast.Name(name, ast.Load())


def _product(match: Match) -> ast.expr:
    """Return ``act(gate) * up``: one kernel where that pays, else the original code in its order of evaluation."""
    act, (gate, up), up_first = expression_of(match.act), match.inputs, match.pattern.up_first
    given = [("@gate", gate)] if not up_first else [("@up", up), ("@gate", gate)]
    pays = made_call("pays", act, *(ast.NamedExpr(ast.Name(name, ast.Store()), value) for name, value in given))
    gate = ast.Name("@gate", ast.Load())
    up = ast.Name("@up", ast.Load()) if up_first else up
    activated = ast.Call(act, [gate], [])
    left, right = (up, activated) if up_first else (activated, up)
    written = ast.BinOp(left, ast.Mult(), right)
    return ast.IfExp(pays, made_call("product", gate, up, act, ast.Constant(up_first)), written)


def arguments_of(match: Match) -> List[ast.expr]:
    """Return the arguments of ``split_mlps.Pending`` for a match."""
    pattern = ast.Name(name_of_pattern(match.pattern), ast.Load())
    return [pattern, *match.inputs, ast.Tuple(list(match.projections), ast.Load()), expression_of(match.act)]


def _split_mlp_of_children(memory: str, match: SplitMLP) -> ast.expr:
    modules = (match.second, match.first)
    owners = {ast.unparse(each.value) if isinstance(each, ast.Attribute) else None for each in modules}
    name, given = "split mlp", modules
    if len(owners) == 1 and isinstance(owner := getattr(match.second, "value", None), ast.Name):
        name, given = "split mlp of children", (owner, ast.Constant(tuple(each.attr for each in modules)))
    return made_call(name, ast.Constant(memory), *given, match.x, *match.rest, named=match.named)


def _modulation(modulation: Optional[Modulation]) -> ast.expr:
    if modulation is None:
        return ast.Constant(None)
    return ast.Tuple([modulation.scale, modulation.shift or ast.Constant(None)], ast.Load())


def expression_of(act: Act) -> ast.expr:
    """Return the expression for an activation as a callable of one tensor."""
    if act.form == "call" and not act.options and not act.named:
        return act.callee
    return made_call(act.form, act.callee, *act.options, named=act.named)


def name_of_pattern(pattern: Pattern) -> str:
    return f"@{pattern!r}"


def made_call(name: str, *arguments: ast.expr, named: Tuple[ast.keyword, ...] = ()) -> ast.expr:
    return ast.Call(ast.Name(f"@{name}", ast.Load()), list(arguments), list(named))


# Functions that the calls use. Rewritten methods refer to them by names that no source can spell.


_CALLS = {
    "block": shortcut.block,
    "block of a module": blocks.block,
    "split mlp": split_mlps.split_mlp,
    "split mlp of children": split_mlps.split_mlp_of_children,
    "finished": split_mlps.finished,
    "in one": chunks.in_one,
    "in turn": sequences.in_turn,
    "pays": pointwise.pays,
    "product": pointwise.product,
    "fused": shortcut.fused,
    **forms.FORMS,
}
NAMES = {f"@{name}": function for name, function in _CALLS.items()}
