"""Conditions on a module's own attributes that stand between an MLP and its block, moved in front of both.

    x = self.mlp(self.norm(x))              if self.scaled:
    if self.scaled:                             x = self.mlp(self.norm(x))
        x = self.scale * x                      x = self.scale * x
    return residual + x                         return residual + x
                                            else:
                                                x = self.mlp(self.norm(x))
                                                return residual + x

Each branch is then code without conditions, in which a block is found.
"""

from __future__ import annotations

import ast
import copy
from typing import Callable, Iterator, List, Optional

from .effects import bound
from .names import SIMPLE, blocks
from .roles import Role, RoleOf, harmless_calls

_MOST = 2  # conditions that are moved: each doubles the code

_IsSettled = Callable[[ast.expr], bool]

# What a condition may be made of, beside names.
_PLAIN = (ast.Attribute, ast.Constant, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.expr_context)
_PLAIN += (ast.unaryop, ast.boolop, ast.cmpop)

# What may be called near an MLP: none of what its block waits for, such as an attention.
_NEAR = {Role.WHOLE, Role.NORM, Role.SCALE, Role.PASSING, Role.DROPOUT}


def parted(function: ast.FunctionDef, role: RoleOf) -> Iterator[ast.FunctionDef]:
    """Copies of a method with one condition moved, and with one more; none where there is nothing to move."""
    for most in range(1, _MOST + 1):
        made = copy.deepcopy(function)
        is_settled = _settled(made, role)
        if not any([_part(block, role, is_settled, most) for block in list(blocks(made))]):
            return
        yield made


def _settled(function: ast.FunctionDef, role: RoleOf) -> _IsSettled:
    """Tells conditions that the attributes of a method's first argument decide, or the class of one."""
    first = [*function.args.posonlyargs, *function.args.args][0].arg
    local = bound(function) | {part.arg for part in ast.walk(function.args) if isinstance(part, ast.arg)}

    def is_settled(condition: ast.expr) -> bool:
        for part in ast.walk(condition):
            if isinstance(part, ast.Name):
                fits = part.id == first or part.id not in local
            elif isinstance(part, ast.Call):
                fits = role(part.func) == Role.ASKING and not part.keywords
            else:
                fits = isinstance(part, _PLAIN)
            if not fits:
                return False
        return True

    return is_settled


def _part(block: List[ast.stmt], role: RoleOf, is_settled: _IsSettled, most: int) -> bool:
    """Moves up to so many conditions to where that begins which leads to a block's first MLP; whether there is one."""
    start = _start(block, role, is_settled)
    if start is None:
        return False
    behind = block[start:]
    block[start:] = _branches(behind, is_settled, most)
    return block[start:] != behind


def _start(block: List[ast.stmt], role: RoleOf, is_settled: _IsSettled) -> Optional[int]:
    may_call = harmless_calls(role)

    def callees(statement: ast.stmt) -> List[ast.expr]:
        return [part.func for part in ast.walk(statement) if isinstance(part, ast.Call)]

    def is_near(statement: ast.stmt) -> bool:
        is_plain = is_settled(statement.test) if isinstance(statement, ast.If) else isinstance(statement, SIMPLE)
        near = (may_call(callee) or role(callee) in {*_NEAR, Role.ASKING} for callee in callees(statement))
        return is_plain and all(near)

    for index, statement in enumerate(block):
        if Role.WHOLE not in map(role, callees(statement)):
            continue
        while index > 0 and is_near(block[index - 1]):
            index -= 1
        return index if is_near(statement) else None
    return None


def _branches(statements: List[ast.stmt], is_settled: _IsSettled, most: int) -> List[ast.stmt]:
    for index, statement in enumerate(statements if most > 0 else ()):
        if isinstance(statement, ast.If) and is_settled(statement.test):
            before, behind = statements[:index], statements[index + 1 :]
            both = [copy.deepcopy([*before, *taken, *behind]) for taken in (statement.body, statement.orelse)]
            branches = (_branches(each, is_settled, most - 1) for each in both)
            return [ast.copy_location(ast.If(statement.test, *branches), statement)]
    return statements
