"""Sums in front of blocks that begin with a norm, taken into the call of the block.

    h = a + residual                    found = block of a sum(a, residual)
    residual = h                        if found is None:
    found = block(h, residual)              ...  # the statements on the left
    if found is None:                   return found
        ...
    return found

Where autograd follows, the sum is then of the block's node, and computed by the kernel of its norm.
"""

from __future__ import annotations

import ast
from typing import Any, Dict, List, Optional

from ..reading.names import Place, assignment, blocks, reads_of
from .fused_calls import made_call

_CALLS = {"@block", "@block of a module"}


def take_in(function: ast.FunctionDef, plans: Dict[str, Any]) -> None:
    """Takes such sums into the calls of a method whose blocks have been replaced; ``plans`` are those of its calls."""
    for block in list(blocks(function)):
        for index in range(len(block) - 2, 0, -1):
            call = _call_in(block[index], plans)
            start = None if call is None else _start(function, block, index, call)
            if start is None:
                continue
            _, added = assignment(block[start])
            plan, owner, *_, operands = call.args
            name = block[index].targets[0].id
            made = made_call("block of a sum", plan, owner, added.left, added.right, operands)
            test = ast.Compare(ast.Name(name, ast.Load()), [ast.Is()], [ast.Constant(None)])
            statements = [ast.Assign([ast.Name(name, ast.Store())], made), ast.If(test, block[start : index + 2], [])]
            for part in (part for each in statements for part in ast.walk(each) if not hasattr(part, "lineno")):
                ast.copy_location(part, block[start])
            block[start : index + 2] = statements


def _call_in(statement: ast.stmt, plans: Dict[str, Any]) -> Optional[ast.Call]:
    """The call of a block that begins with a norm, and is of a name, its own residual; None of any other statement."""
    target, call = assignment(statement)
    is_call = isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in _CALLS
    if not is_call or not isinstance(target, ast.Name) or not target.id.startswith("@"):
        return None
    plan, _, x, residual, factor, modulation, _ = call.args
    is_plain = ast.unparse(factor) == "1.0" and ast.unparse(modulation) == "None"
    of_names = isinstance(x, ast.Name) and isinstance(residual, ast.Name)
    begins = plans[plan.id].first is not None and plans[plan.id].last is None
    return call if is_plain and of_names and begins else None


def _start(function: ast.FunctionDef, block: List[ast.stmt], index: int, call: ast.Call) -> Optional[int]:
    """The place of the sum that a block is of, if nothing else reads it; None if there is no such sum."""
    wanted, start = {call.args[2].id, call.args[3].id}, index
    while start > 0 and wanted:
        start -= 1
        target, value = assignment(block[start])
        if not isinstance(target, ast.Name) or target.id not in wanted:
            return None
        wanted.discard(target.id)
        if isinstance(value, ast.Name):
            wanted.add(value.id)
            continue
        is_sum = isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add) and not wanted
        if not is_sum or not _are_two_names(value):
            return None
        inside = {part for statement in block[start + 1 : index + 2] for part in ast.walk(statement)}
        for place in range(start, index):
            (name,) = block[place].targets
            reads = reads_of(name.id, Place(function, block, place))
            if reads is None or not reads <= inside:
                return None
        return start
    return None


def _are_two_names(value: ast.BinOp) -> bool:
    left, right = value.left, value.right
    return isinstance(left, ast.Name) and isinstance(right, ast.Name) and left.id != right.id
