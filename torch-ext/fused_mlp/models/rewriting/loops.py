"""Loops that run modules one after the other, and do nothing else: ``for module in self.net: x = module(x)``."""

from __future__ import annotations

import ast
from typing import Callable, List, Optional

from ..parts.roles import Role, RoleOf, is_call
from ..parts.sites import Turns
from ..reading.effects import uses
from ..reading.names import assignment, blocks, is_name


def rewrite(function: ast.FunctionDef, role: RoleOf, replacement: Callable[[Turns], ast.expr]) -> List[Turns]:
    """Puts an assignment of ``replacement(site)`` in the place of every such loop over a sequence with MLPs in it."""
    found: List[Turns] = []
    for block in list(blocks(function)):
        for index, statement in enumerate(block):
            site = _turns(statement, function, role)
            if site is not None:
                found.append(site)
                made = ast.Assign([ast.Name(site.x.id, ast.Store())], replacement(site))
                block[index] = ast.copy_location(made, statement)
    return found


def _turns(statement: ast.stmt, function: ast.FunctionDef, role: RoleOf) -> Optional[Turns]:
    if not isinstance(statement, ast.For) or statement.orelse or len(statement.body) != 1:
        return None
    target, call = assignment(statement.body[0])
    is_sequence = isinstance(statement.iter, ast.Attribute) and role(statement.iter) == Role.SEQUENCE
    if not is_sequence or not isinstance(target, ast.Name) or not isinstance(statement.target, ast.Name):
        return None
    name = statement.target.id
    is_turn = is_call(call, lambda callee: Role.LAYER if is_name(callee, name) else None, Role.LAYER)
    if not is_turn or not is_name(call.args[0], target.id) or name == target.id:
        return None
    return Turns(statement.iter, call.args[0]) if uses(function, name) == {call.func} else None
