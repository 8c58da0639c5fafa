"""Finds the sum that a block is of, where calls of blocks that begin with a norm stand in a method already:

h = a + residual
residual = h
found = block(h, residual)
if found is None:
    ...
"""

from __future__ import annotations

import ast
from typing import Any, Dict, Iterator, List, Optional, Set, Tuple

from ..reading.names import Place, assignment, blocks, reads_of


def in_front(
    function: ast.FunctionDef, callees: Set[str], plans: Dict[str, Any]
) -> Iterator[Tuple[List[ast.stmt], int, int]]:
    """The statements from a sum to the call of its block, by their block and the places of both, the last first.

    ``callees`` are the functions that are called, and ``plans`` those of the calls. Nothing else reads the sum.
    """
    for block in list(blocks(function)):
        for index in range(len(block) - 2, 0, -1):
            call = _call_in(block[index], callees, plans)
            start = None if call is None else _start(function, block, index, call)
            if start is not None:
                yield block, start, index


def _call_in(statement: ast.stmt, callees: Set[str], plans: Dict[str, Any]) -> Optional[ast.Call]:
    """The call of a block that begins with a norm, of a name that is its residual too; None of other statements."""
    target, call = assignment(statement)
    is_call = isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in callees
    if not is_call or not isinstance(target, ast.Name) or not target.id.startswith("@"):  # no name that a source has
        return None
    plan, _, x, residual, factor, modulation, _ = call.args
    is_plain = ast.unparse(factor) == "1.0" and ast.unparse(modulation) == "None"
    of_names = isinstance(x, ast.Name) and isinstance(residual, ast.Name)
    begins = plans[plan.id].first is not None and plans[plan.id].last is None
    return call if is_plain and of_names and begins else None


def _start(function: ast.FunctionDef, block: List[ast.stmt], index: int, call: ast.Call) -> Optional[int]:
    """The place of the sum that both operands of a call at ``index`` name; None where something else reads it, or
    stands between."""
    wanted, start = {call.args[2].id, call.args[3].id}, index
    while start > 0:
        start -= 1
        target, value = assignment(block[start])
        if not isinstance(target, ast.Name) or target.id not in wanted:
            return None
        wanted.discard(target.id)
        if not isinstance(value, ast.Name):
            break
        wanted.add(value.id)
    if wanted or not isinstance(value, ast.BinOp) or not isinstance(value.op, ast.Add):
        return None
    left, right = value.left, value.right
    if not (isinstance(left, ast.Name) and isinstance(right, ast.Name)) or left.id == right.id:
        return None
    inside = {part for statement in block[start + 1 : index + 2] for part in ast.walk(statement)}
    for place in range(start, index):
        target, _ = assignment(block[place])
        reads = reads_of(target.id, Place(function, block, place))
        if reads is None or not reads <= inside:
            return None
    return start
