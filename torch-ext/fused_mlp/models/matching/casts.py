"""Conditional casts to the dtype of a projection's weight, as in T5 before its last projection.

    if projection.weight.dtype != hidden.dtype:
        hidden = hidden.to(projection.weight.dtype)

If the hidden values have that dtype already, nothing is cast, whatever the condition. A fused call whose operands share
one dtype therefore does not evaluate it.
"""

from __future__ import annotations

import ast
import copy
from typing import List, NamedTuple, Optional

from ..reading.effects import MayCall, is_harmless

_ARGUMENT = "@hidden"  # no source can spell it


class Cast(NamedTuple):
    """``if test: name = name.to(dtype)``; ``assignment`` is the statement in it."""

    test: ast.expr
    assignment: ast.Assign
    name: str


def cast_of(statement: ast.stmt) -> Optional[Cast]:
    """Return the cast that a statement consists of; None for any other statement."""
    if not isinstance(statement, ast.If) or statement.orelse or len(statement.body) != 1:
        return None
    (assignment,) = statement.body
    name = _bound(assignment)
    return Cast(statement.test, assignment, name) if name is not None and name == _cast(assignment.value) else None


def as_values(block: List[ast.stmt], may_call: MayCall) -> None:
    """Turn casts that follow a statement binding the name into ``name = name.to(dtype) if test else name``."""
    for index in range(1, len(block)):
        cast = cast_of(block[index])
        if cast is None or cast.name != _bound(block[index - 1]) or not is_harmless(cast.test, may_call):
            continue
        value = ast.IfExp(cast.test, cast.assignment.value, ast.Name(cast.name, ast.Load()))
        for node in (value, value.orelse):
            ast.copy_location(node, block[index])
        cast.assignment.value, block[index] = value, cast.assignment


def name_of(node: ast.expr, projection: ast.expr, may_call: MayCall) -> Optional[str]:
    """Return the name that such a value casts to the dtype of a projection's weight; None if it does not."""
    if not isinstance(node, ast.IfExp) or not isinstance(node.orelse, ast.Name) or not is_harmless(node.test, may_call):
        return None
    name = _cast(node.body)
    is_own = name == node.orelse.id and ast.unparse(node.body.args[0]) == f"{ast.unparse(projection)}.weight.dtype"
    return name if is_own else None


def as_function(node: ast.IfExp) -> ast.Lambda:
    """Return such a value as a function of its name's value."""
    body, name = copy.deepcopy(node), node.orelse.id
    for part in ast.walk(body):
        if isinstance(part, ast.Name) and part.id == name:
            part.id = _ARGUMENT
    arguments = ast.arguments([], [ast.arg(_ARGUMENT)], kwonlyargs=[], kw_defaults=[], defaults=[])
    return ast.Lambda(arguments, body)


def _bound(statement: ast.stmt) -> Optional[str]:
    """Return the name that a statement binds, if it does nothing else."""
    is_one = isinstance(statement, ast.Assign) and len(statement.targets) == 1
    return statement.targets[0].id if is_one and isinstance(statement.targets[0], ast.Name) else None


def _cast(node: ast.expr) -> Optional[str]:
    """Return the name in ``name.to(dtype)``."""
    if not isinstance(node, ast.Call) or node.keywords or len(node.args) != 1:
        return None
    is_cast = isinstance(node.func, ast.Attribute) and node.func.attr == "to" and isinstance(node.func.value, ast.Name)
    return node.func.value.id if is_cast else None
