"""Finds MLPs in the source of a function: where the output of a projection goes through an activation.

A site is an expression that one call of ``forwards`` computes, its parts perhaps bound to names in statements before
it. Names are followed only to the one assignment that certainly bound them, and a site is given up wherever taking the
statements together could change what the function computes, whatever its arguments are.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Callable, FrozenSet, Iterator, List, Optional, Set, Tuple

# What the callee of a call may be. PASSING: a module that hands its input on in evaluation; DROPOUT: F.dropout; LAYER:
# another module, with parameters.
PROJECTION, ACTIVATION, PASSING, DROPOUT, LAYER = "projection", "activation", "passing", "dropout", "layer"
Role = Callable[[ast.expr], Optional[str]]

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_SCOPES += (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

_SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Expr)

# What may change a tensor or an attribute, or call what does; beside calls of projections and of these methods.
_EFFECTS = (ast.Call, ast.Await, ast.Yield, ast.YieldFrom, ast.AugAssign, ast.NamedExpr, ast.Delete, ast.With, ast.For)
_HARMLESS = {"chunk", "clamp", "float", "reshape", "to", "view"}


@dataclass(frozen=True)
class Site:
    """One fused call, ``pattern`` being its kind; all parts are expressions of the source.

    ``between`` are what the hidden values go through before the last projection: modules, or probabilities of dropout.
    ``read`` are the names that were followed, ``up_first`` is the order of pointwise inputs.
    """

    pattern: str
    inputs: Tuple[ast.expr, ...]
    projections: Tuple[ast.expr, ...]
    activation: ast.expr
    between: Tuple[ast.expr, ...] = ()
    read: FrozenSet[ast.Name] = frozenset()
    up_first: bool = False


def rewrite(
    function: ast.FunctionDef, role: Role, wanted: Callable[[Site], bool], replacement: Callable[[Site], ast.expr]
) -> List[Site]:
    """Puts ``replacement(site)`` in the place of every wanted site of ``function``, and returns these sites."""
    sites: List[Site] = []
    for block in list(_blocks(function)):
        index = len(block) - 1
        while index >= 0:
            place = _Place(function, block, index)
            site, node, absorbed = next(_sites(place, role, wanted), (None, None, ()))
            if site is None:
                index -= 1
                continue
            sites.append(site)
            block[index] = _Replacement(node, replacement(site)).visit(block[index])
            for k in sorted(absorbed, reverse=True):
                del block[k]
            index -= len(absorbed)
    return sites


@dataclass(frozen=True)
class _Place:
    """A statement, in its block, in its function."""

    function: ast.FunctionDef
    block: List[ast.stmt]
    index: int


@dataclass(frozen=True)
class _Value:
    """An expression, the place where it is evaluated, and the names that were followed to it.

    ``half`` says which half of the expression's last dimension, if not the whole.
    """

    node: ast.expr
    place: _Place
    read: FrozenSet[ast.Name] = frozenset()
    half: Optional[int] = None

    def part(self, node: ast.expr) -> _Value:
        """A part of this expression, followed to where it was bound."""
        return _follow(_Value(node, self.place, self.read))


def _sites(place: _Place, role: Role, wanted: Callable[[Site], bool]) -> Iterator[Tuple[Site, ast.expr, Set[int]]]:
    """The sites in a statement, the outermost first, and the statements that each takes in."""
    if not isinstance(place.block[place.index], _SIMPLE):
        return
    for node in _expressions(place.block[place.index]):
        for match in (_whole, _hidden, _pointwise):
            site = match(_Value(node, place), role)
            absorbed = _absorbed(site, node, place, role) if site is not None and wanted(site) else None
            if absorbed is not None:
                yield site, node, absorbed


# Patterns. P is a projection, A an activation.

_WHOLE = {  # with a projection at the end
    "linear": "plain",
    "gated linear": "gated",
    "packed gated linear": "packed gated",
    "packed gated linear, up first": "packed gated, up first",
}


def _whole(value: _Value, role: Role) -> Optional[Site]:
    """``P(...(hidden))``"""
    if not _is_call(value.node, role, PROJECTION):
        return None
    last, between = value.node.func, []
    value = value.part(value.node.args[0])
    part = _between(value, role)
    while part is not None:
        between.insert(0, part)
        value = value.part(value.node.args[0])
        part = _between(value, role)
    site = _hidden(value, role)
    if site is None:
        return None
    return Site(
        _WHOLE[site.pattern], site.inputs, (*site.projections, last), site.activation, tuple(between), site.read
    )


def _hidden(value: _Value, role: Role) -> Optional[Site]:
    """``A(P(x))``, ``A(P(x)) * P(x)``, ``A(half) * other_half`` of ``P(x)``"""
    if value.half is None and _is_call(value.node, role, ACTIVATION):
        inner = value.part(value.node.args[0])
        if inner.half is None and _is_call(inner.node, role, PROJECTION):
            return Site("linear", (inner.node.args[0],), (inner.node.func,), value.node.func, read=inner.read)
    for act, other in _gated(value, role):
        gate, up = act.part(act.node.args[0]), value.part(other)
        if not (_is_call(gate.node, role, PROJECTION) and _is_call(up.node, role, PROJECTION)):
            continue
        x, read = gate.node.args[0], gate.read | up.read
        same_x = isinstance(x, ast.Name) and _is_name(up.node.args[0], x.id)
        if gate.half is None and up.half is None and same_x and gate.node is not up.node:
            return Site("gated linear", (x,), (gate.node.func, up.node.func), act.node.func, read=read)
        if gate.node is up.node and {gate.half, up.half} == {0, 1}:
            pattern = "packed gated linear" if gate.half == 0 else "packed gated linear, up first"
            return Site(pattern, (x,), (gate.node.func,), act.node.func, read=read)
    return None


def _pointwise(value: _Value, role: Role) -> Optional[Site]:
    """``A(gate) * up``, the three computed in the order in which they were, but for A after up."""
    for act, up in _gated(value, role):
        gate, direct = act.node.args[0], act.place == value.place
        up_first = direct and up is value.node.left
        fresh = direct and (_is_call(gate, role, LAYER) or _is_call(gate, role, PROJECTION))
        if up_first or not _has_effects(up, role) or (fresh and _is_call(up, role, LAYER)):
            return Site("pointwise", (gate, up), (), act.node.func, read=act.read, up_first=up_first)
    return None


def _gated(value: _Value, role: Role) -> Iterator[Tuple[_Value, ast.expr]]:
    """The factors of a product, the one that is an activation's value first."""
    if value.half is None and isinstance(value.node, ast.BinOp) and isinstance(value.node.op, ast.Mult):
        left, right = value.node.left, value.node.right
        for first, second in ((left, right), (right, left)):
            act = value.part(first)
            if act.half is None and _is_call(act.node, role, ACTIVATION):
                yield act, second


def _between(value: _Value, role: Role) -> Optional[ast.expr]:
    """A module that the hidden values go through, or the probability of a dropout that is a function."""
    node = value.node
    if value.half is None and _is_call(node, role, PASSING):
        return node.func
    if value.half is not None or not (isinstance(node, ast.Call) and node.args and role(node.func) == DROPOUT):
        return None
    given = [*zip(("input", "p", "training"), node.args), *((word.arg, word.value) for word in node.keywords)]
    named = dict(given)
    if len(given) != 3 or named.keys() != {"input", "p", "training"}:
        return None
    return ast.IfExp(named["training"], named["p"], ast.Constant(0.0))


def _is_call(node: ast.expr, role: Role, wanted: str) -> bool:
    return isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords and role(node.func) == wanted


# Names and what they were bound to.


def _follow(value: _Value) -> _Value:
    """The expression that a name, or half of a chunked tensor, stands for; the value itself where that is not sure."""
    node, place, half = value.node, value.place, None
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and node.slice.value in (0, 1):
        node, half = node.value, node.slice.value
    if not isinstance(node, ast.Name):
        return value
    for index in range(place.index - 1, -1, -1):
        statement = place.block[index]
        if not _stores(statement, node.id):
            continue
        target, bound = _assignment(statement)
        there, read = _Place(place.function, place.block, index), value.read | {node}
        if isinstance(target, ast.Tuple) and half is None and len(target.elts) == 2:
            half = next((k for k in (0, 1) if _is_name(target.elts[k], node.id)), None)
            if half is None:
                return value
        elif bound is None or not _is_name(target, node.id):
            return value
        if half is None:
            return _follow(_Value(bound, there, read))
        source = _chunked(bound)
        whole = None if source is None else _follow(_Value(source, there, read))
        return value if whole is None or whole.half is not None else _Value(whole.node, whole.place, whole.read, half)
    return value


def _chunked(node: ast.expr) -> Optional[ast.expr]:
    """The tensor of ``tensor.chunk(2, dim=-1)`` or ``torch.chunk(tensor, 2, dim=-1)``."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "chunk"):
        return None
    tensor, sizes = node.func.value, list(node.args)
    if _is_name(tensor, "torch") and sizes:
        tensor = sizes.pop(0)
    given = [*zip(("chunks", "dim"), sizes), *((word.arg, word.value) for word in node.keywords)]
    named = {name: ast.unparse(size) for name, size in given}
    return tensor if len(given) == 2 and named == {"chunks": "2", "dim": "-1"} else None


def _absorbed(site: Site, node: ast.expr, place: _Place, role: Role) -> Optional[Set[int]]:
    """The statements that a site makes superfluous; None if it must not be where it is, or they are needed."""
    absorbed, served = set(), set()
    for index in range(place.index):
        names = {name.id for name in _names(place.block[index], ast.Store)}
        reads = [_reads(name, _Place(place.function, place.block, index)) for name in names]
        if any(read is not None and read & site.read for read in reads):
            if any(read is None or not read <= site.read for read in reads):
                return None
            absorbed.add(index)
            served.update(*reads)
    if served != site.read:
        return None
    if not absorbed:
        return absorbed
    parts = (*site.inputs, *site.projections, site.activation, *site.between)
    needed = {name.id for part in parts for name in _names(part, ast.Load)}
    for index in range(min(absorbed), place.index):
        if index not in absorbed:
            statement = place.block[index]
            if _has_effects(statement, role) or any(name.id in needed for name in _names(statement, ast.Store)):
                return None
    return None if _has_effects(place.block[place.index], role, but=node) else absorbed


def _reads(name: str, place: _Place) -> Optional[Set[ast.Name]]:
    """Where the value that a statement gives to a name may be read; None if that cannot be told."""
    for scope in ast.walk(place.function):
        if isinstance(scope, _SCOPES) and scope is not place.function and _uses(scope, name):
            return None
    later: List[ast.stmt] = []
    for statement in place.block[place.index + 1 :]:
        later.append(statement)
        target, bound = _assignment(statement)
        if bound is not None and _stores(target, name):
            break  # what is read in the value comes first
    else:
        if place.block is not place.function.body:  # read after the block, or before it in the next turn of a loop?
            used = _uses(place.function, name)
            return used if used <= set().union(*(_uses(statement, name) for statement in later)) else None
    return set().union(*(_uses(statement, name) for statement in later))


def _assignment(statement: ast.stmt) -> Tuple[Optional[ast.expr], Optional[ast.expr]]:
    """Target and value of a statement that is one assignment."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        return statement.targets[0], statement.value
    if isinstance(statement, ast.AnnAssign):
        return statement.target, statement.value
    return None, None


def _has_effects(node: ast.AST, role: Role, but: Optional[ast.expr] = None) -> bool:
    """Whether code does more than compute and bind names, leaving out one expression in it and what holds that."""
    inside = set() if but is None else set(ast.walk(but))
    for part in ast.walk(node):
        if part in inside or (but is not None and but in ast.walk(part)):
            continue
        if isinstance(part, ast.Call):
            harmless = isinstance(part.func, ast.Attribute) and part.func.attr in _HARMLESS
            if not harmless and role(part.func) != PROJECTION:
                return True
        elif isinstance(part, _EFFECTS) or (
            isinstance(part, (ast.Attribute, ast.Subscript)) and isinstance(part.ctx, ast.Store)
        ):
            return True
    return False


# The tree.


def _blocks(node: ast.AST) -> Iterator[List[ast.stmt]]:
    """The lists of statements of a function, but not of functions inside it."""
    for _, field in ast.iter_fields(node):
        children = field if isinstance(field, list) else [field]
        if children and isinstance(children[0], ast.stmt):
            yield field
        for child in children:
            if isinstance(child, ast.AST) and not isinstance(child, _SCOPES):
                yield from _blocks(child)


def _expressions(node: ast.AST) -> Iterator[ast.expr]:
    """The expressions of a statement itself, from the outside in."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr) and not isinstance(child, _SCOPES):
            yield child
            yield from _expressions(child)
        elif isinstance(child, ast.keyword):
            yield from _expressions(child)


def _names(node: ast.AST, context: type) -> List[ast.Name]:
    return [name for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, context)]


def _uses(node: ast.AST, name: str) -> Set[ast.Name]:
    """Where a name is read, or deleted."""
    names = {other for other in ast.walk(node) if isinstance(other, ast.Name) and other.id == name}
    return {other for other in names if not isinstance(other.ctx, ast.Store)}


def _stores(node: ast.AST, name: str) -> bool:
    return any(
        isinstance(other, ast.Name) and other.id == name and not isinstance(other.ctx, ast.Load)
        for other in ast.walk(node)
    )


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


class _Replacement(ast.NodeTransformer):
    def __init__(self, old: ast.expr, new: ast.expr) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else self.generic_visit(node)
