"""The call that stands in the place of a site, as an expression, and the functions that such calls name."""

from __future__ import annotations

import ast
from types import FunctionType
from typing import List, Optional, Set, Tuple

from ..parts import forms
from ..parts.pattern import Pattern
from ..parts.roles import Role
from ..parts.sites import Act, AnySite, Block, Joint, Modulation, Site, Turns, Whole
from ..running import blocks, halves, pointwise, sequences, shortcut
from . import chunks


def call_of(memory: str, function: FunctionType, site: AnySite) -> ast.expr:
    """For a site of a method; ``memory``: what training keeps."""
    if isinstance(site, Joint):
        return _joined(memory, site)
    if isinstance(site, Turns):
        return made_call("in turn", ast.Constant(memory), site.modules, site.x)
    if isinstance(site, Block):
        return _block(function, site)
    if site.pattern.pointwise:
        return _product(site)
    return _by_names("fused", function, arguments_of(site), {2, 4, *_act_by_name(site)})


def _product(site: Site) -> ast.expr:
    """``act(gate) * up``: one kernel where that pays, else what the source says, in its order."""
    act, (gate, up), up_first = expression_of(site.act), site.inputs, site.pattern.up_first
    given = [("@gate", gate)] if not up_first else [("@up", up), ("@gate", gate)]
    pays = made_call("pays", act, *(ast.NamedExpr(ast.Name(name, ast.Store()), value) for name, value in given))
    gate = ast.Name("@gate", ast.Load())
    up = ast.Name("@up", ast.Load()) if up_first else up
    activated = ast.Call(act, [gate], [])
    left, right = (up, activated) if up_first else (activated, up)
    written = ast.BinOp(left, ast.Mult(), right)
    return ast.IfExp(pays, made_call("product", gate, up, act, ast.Constant(up_first)), written)


def arguments_of(site: Site) -> List[ast.expr]:
    """The arguments of ``shortcut.fused`` for a match."""
    projections, between = (ast.Tuple(list(parts), ast.Load()) for parts in (site.projections, site.between))
    pattern = ast.Name(name_of_pattern(site.pattern), ast.Load())
    return [pattern, *site.inputs, projections, expression_of(site.act), between]


def _joined(memory: str, site: Joint) -> ast.expr:
    halves = (site.tail, site.head)
    owners = {ast.unparse(half.value) if isinstance(half, ast.Attribute) else None for half in halves}
    name, given = "joined", halves
    if len(owners) == 1 and isinstance(owner := getattr(site.tail, "value", None), ast.Name):
        name, given = "joined children", (owner, ast.Constant(tuple(half.attr for half in halves)))
    return made_call(name, ast.Constant(memory), *given, site.x, *site.rest, named=site.named)


def _block(function: FunctionType, block: Block) -> ast.expr:
    """The call of what computes the MLP, with what is around it behind its own arguments."""
    none = ast.Constant(None)
    around = [ast.Tuple(list(block.behind), ast.Load()), block.factor or ast.Constant(1.0), block.residual]
    around += [block.first or none, block.last or none, _modulation(block.modulation)]
    around.append(ast.Constant(block.wide))
    if isinstance(block.site, Whole):
        return _by_names("block of a module", function, [*block.site.parts, *around], {0, 2, 5, 6})
    places = {2, 4, 5, 8, 9, *_act_by_name(block.site)}
    return _by_names("block", function, [*arguments_of(block.site), *around], places)


def _modulation(modulation: Optional[Modulation]) -> ast.expr:
    if modulation is None:
        return ast.Constant(None)
    flags = ast.Constant(modulation.scale_first), ast.Constant(modulation.wide)
    return ast.Tuple([modulation.scale, modulation.shift or ast.Constant(None), *flags], ast.Load())


def _act_by_name(site: Site) -> Set[int]:
    """The place of an activation among the arguments, where it may be given by name: no method is found by that."""
    return set() if site.act.role == Role.BOUND else {3}


def _by_names(name: str, function: FunctionType, arguments: List[ast.expr], places: Set[int]) -> ast.expr:
    """A call with names in the place of attributes of the method's first argument; that, and all names, come last."""
    owner, names = function.__code__.co_varnames[0], {}

    def named(node: ast.expr) -> ast.expr:
        if isinstance(node, ast.Tuple):
            return ast.Tuple([named(each) for each in node.elts], ast.Load())
        if not isinstance(node, ast.Attribute) or ast.unparse(node.value) != owner:
            return node
        names[node.attr] = ast.Name(owner, ast.Load())
        return ast.Constant(node.attr)

    given = [named(node) if place in places else node for place, node in enumerate(arguments)]
    return made_call(name, *given, next(iter(names.values()), ast.Constant(None)), ast.Constant((*names,)))


def expression_of(act: Act) -> ast.expr:
    """The expression for an activation as a callable of one tensor."""
    if act.form == "call" and not act.options and not act.named:
        return act.callee
    if act.form == "method":
        return made_call("method", ast.Constant(act.name))
    if act.form == "squared":
        return made_call("squared", expression_of(act.base))
    if act.form == "self-gated":
        return made_call("self-gated", act.callee, ast.Constant(act.slope))
    return made_call(act.form, act.callee, *act.options, named=act.named)


def name_of_pattern(pattern: Pattern) -> str:
    return f"@{pattern!r}"


def made_call(name: str, *arguments: ast.expr, named: Tuple[ast.keyword, ...] = ()) -> ast.expr:
    return ast.Call(ast.Name(f"@{name}", ast.Load()), list(arguments), list(named))


# Functions that the calls name. Rewritten methods refer to them by names that no source can spell.


_CALLS = {
    "block": shortcut.block,
    "block of a module": blocks.block,
    "ending": shortcut.ending,
    "joined": halves.joined,
    "joined children": halves.joined_children,
    "finished": halves.finished,
    "in one": chunks.in_one,
    "in turn": sequences.in_turn,
    "pays": pointwise.pays,
    "product": pointwise.product,
    "fused": shortcut.fused,
    **forms.FORMS,
}
NAMES = {f"@{name}": function for name, function in _CALLS.items()}
