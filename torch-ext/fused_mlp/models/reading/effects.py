"""Bindings, reads and side effects of code, from its syntax. Only listed syntax is considered harmless."""

from __future__ import annotations

import ast
import functools
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from types import FunctionType
from typing import Callable, Iterator, Optional, Set, Tuple

from .source import bound_names, inside, is_held, remembered, tree_of, value_of

MayCall = Callable[[ast.expr], bool]  # true if a call only computes

# Nodes that only compute or bind names.
_HARMLESS = (ast.Assign, ast.AnnAssign, ast.If, ast.Pass, ast.Expr, ast.expr_context, ast.keyword)
_HARMLESS += (ast.Name, ast.Constant, ast.Attribute, ast.Subscript, ast.Slice, ast.Tuple, ast.List, ast.Starred)
_HARMLESS += (ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.operator, ast.unaryop, ast.boolop)
_HARMLESS += (ast.cmpop,)

# Nodes that always evaluate all their children.
_UNCONDITIONAL = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Expr)
_UNCONDITIONAL += (ast.Call, ast.keyword, ast.BinOp, ast.UnaryOp, ast.Tuple, ast.List, ast.Dict, ast.Starred)
_UNCONDITIONAL += (ast.Attribute, ast.Subscript)

_READS_LOCALS = {"locals", "vars", "dir", "eval", "exec"}


def readable(function: FunctionType) -> Optional[ast.FunctionDef]:
    """Return the definition of a method; None if its names cannot be resolved from the syntax alone."""
    tree = _resolved(function)
    arguments = [] if tree is None else [*tree.args.posonlyargs, *tree.args.args]
    if not arguments or any(arguments[0].arg in bound(statement) for statement in tree.body):
        return None
    return tree


def _resolved(function: FunctionType) -> Optional[ast.FunctionDef]:
    tree = tree_of(function)
    if tree is None or function.__code__.co_flags & (CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR):
        return None
    if getattr(tree, "type_params", ()):
        return None
    for node in ast.walk(tree):
        if isinstance(node, (ast.Global, ast.Nonlocal)) or (isinstance(node, ast.Name) and node.id in _READS_LOCALS):
            return None
        if any(_is_private(name) for name in _identifiers(node)):  # a class mangles them
            return None
    return tree


def bound(node: ast.AST) -> Set[str]:
    """Return the names that a node, or anything in it, may bind."""
    return {name for part in ast.walk(node) for name in bound_names(part)}


def uses(node: ast.AST, name: str) -> Set[ast.Name]:
    """Return the nodes that read or delete a name."""
    changed = {part.target for part in ast.walk(node) if isinstance(part, ast.AugAssign)}
    names = {other for other in ast.walk(node) if isinstance(other, ast.Name) and other.id == name}
    return {other for other in names if other in changed or not isinstance(other.ctx, ast.Store)}


def is_harmless(node: ast.AST, may_call: MayCall) -> bool:
    """True if code only computes and binds names."""
    for part in ast.walk(node):
        if isinstance(part, ast.Call):
            if not may_call(part.func):
                return False
        elif not isinstance(part, _HARMLESS) or (
            isinstance(part, (ast.Attribute, ast.Subscript)) and not isinstance(part.ctx, ast.Load)
        ):
            return False
    return True


def is_reached(node: ast.expr, holder: ast.AST, may_call: MayCall) -> bool:
    """True if ``holder`` always evaluates the expression ``node`` in it, and the rest of its code is harmless."""
    if holder is node:
        return True
    if not isinstance(holder, _UNCONDITIONAL):
        return False
    targets = [holder.target] if isinstance(holder, ast.AnnAssign) else getattr(holder, "targets", ())
    for child in ast.iter_child_nodes(holder):
        if child in targets:  # evaluated last
            continue
        if not (is_reached(node, child, may_call) if node in ast.walk(child) else is_harmless(child, may_call)):
            return False
    return True


def is_plain(node: ast.expr) -> bool:
    """True for a name, an attribute or a constant, which may be evaluated at any time and any number of times."""
    return isinstance(node, (ast.Constant, ast.Name, ast.Attribute))


def is_view(node: ast.expr) -> bool:
    """True if an expression is a name, perhaps with dimensions added: ``h[:, None]``, ``h.unsqueeze(1)``."""
    if isinstance(node, ast.Call):
        axis = node.args[0] if len(node.args) == 1 and not node.keywords else None
        is_unsqueezed = isinstance(node.func, ast.Attribute) and node.func.attr == "unsqueeze"
        return is_unsqueezed and axis is not None and _is_number(axis) and is_view(node.func.value)
    if not isinstance(node, ast.Subscript):
        return isinstance(node, ast.Name)
    places = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    return is_view(node.value) and all(_is_every_or_new(place) for place in places)


def _is_every_or_new(place: ast.expr) -> bool:
    if isinstance(place, ast.Slice):
        return place.lower is place.upper is place.step is None
    return isinstance(place, ast.Constant) and place.value is None


def _is_number(node: ast.expr) -> bool:
    node = node.operand if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) else node
    return isinstance(node, ast.Constant) and type(node.value) is int


def _identifiers(node: ast.AST) -> Iterator[str]:
    for field, value in ast.iter_fields(node):
        if not (isinstance(node, ast.Constant) and field in ("value", "kind")):
            yield from (name for name in (value if isinstance(value, list) else [value]) if isinstance(name, str))


def _is_private(name: str) -> bool:
    return name.startswith("__") and not name.endswith("__")


def around(function: FunctionType) -> Tuple[FunctionType, ...]:
    """Return the functions that decorators put around a method, from the outside, if each of them does nothing with
    the one inside but call it and read its name."""
    inner = inside(function)
    return () if inner is None or name_inside(function, inner) is None else (function, *around(inner))


@remembered
def name_inside(outer: FunctionType, inner: FunctionType) -> Optional[str]:
    """Return the name by which such a function holds the one inside; None for any other function."""
    code, tree = outer.__code__, _resolved(outer)
    names = [name for name, cell in zip(code.co_freevars, outer.__closure__ or ()) if is_held(cell, inner)]
    if tree is None or len(names) != 1:
        return None
    if tree.args.args or tree.args.posonlyargs:
        tree = readable(outer)
    elif tree.args.vararg is None or any(tree.args.vararg.arg in bound(statement) for statement in tree.body):
        return None
    harmless = set()
    for node in () if tree is None else ast.walk(tree):
        if isinstance(node, ast.Call):
            harmless.add(node.func)
            is_partial = node.args and value_of(node.func, outer, None) is functools.partial
            harmless.update(node.args[:1] if is_partial else ())
        elif isinstance(node, ast.Attribute) and node.attr in ("__name__", "__qualname__"):
            harmless.add(node.value)
    return names[0] if tree is not None and uses(tree, names[0]) <= harmless else None
