"""Conditions on a module's own attributes inside an MLP or its block, moved in front of it.

    x = self.mlp(self.norm(x))              if self.scaled and not self.late:
    if self.scaled:                             x = self.mlp(self.norm(x))
        x = self.scale * x                      x = self.scale * x
    if self.late:                               return residual + x
        x = self.drop(x)                    else:
    return residual + x                         ...  # the original code

The first branch is the code that runs with the values that the conditions have when the module is fused. It contains
no conditions, so a block can be matched in it. A call such as ``is_torch_npu_available()`` is moved too, if it only
returns a global. ``h = a if self.flag else b`` is such a condition as well, and so is the comparison of ``self.dim``
with -1 in ``h.chunk(2, dim=self.dim)``.
"""

from __future__ import annotations

import ast
import copy
from types import FunctionType
from typing import Any, Dict, List, Optional, Tuple

from ..matching.roles import Role, RoleOf, harmless_calls
from ..proving.evaluation import Evaluation
from ..proving.values import NotProved
from ..reading.effects import bound
from ..reading.names import SIMPLE, blocks, is_name
from .substitution import replace

Condition = Tuple[ast.expr, bool]  # a test and its required value

# AST nodes allowed in a condition, beside names.
_PLAIN = (ast.Attribute, ast.Constant, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.expr_context)
_PLAIN += (ast.unaryop, ast.boolop, ast.cmpop)

# Calls that a condition may be moved over. Other calls, such as attention, may change the condition's value.
_NEAR = {Role.WHOLE, Role.PROJECTION, Role.NORM, Role.SCALE, Role.PASSING, Role.DROPOUT, Role.ASKING, Role.FLAG}
_STARTS = {Role.WHOLE, Role.PROJECTION}  # first calls of an MLP in a method


Answers = Tuple[Tuple[str, bool], ...]  # conditions as source, with their values for a module


def parted(function: ast.FunctionDef, role: RoleOf, answers: Answers) -> Optional[ast.FunctionDef]:
    """Return a copy of a method with its conditions moved, given their values; None if none can be moved."""
    parting = _Parting(copy.deepcopy(function), role)
    made = parting.spread()
    inner_first = reversed(list(blocks(made)))
    return made if any([parting.part(block, dict(answers)) for block in inner_first]) else None


def conditions_in(function: ast.FunctionDef, role: RoleOf) -> Tuple[ast.expr, ...]:
    """Return the conditions in a method that its module alone decides."""
    parting = _Parting(copy.deepcopy(function), role)
    statements = [statement for block in blocks(parting.spread()) for statement in block]
    tests = (_without_not(each.test)[0] for each in statements if parting.asks_module(each))
    return tuple({ast.unparse(test): test for test in tests}.values())


def answers_of(conditions: Tuple[ast.expr, ...], function: FunctionType, module: Any) -> Answers:
    """Return the current values of a module's conditions, without those that raise."""
    found = ((ast.unparse(test), _value(test, function, module)) for test in conditions)
    return tuple((text, value) for text, value in found if value is not None)


def conditions_of(function: ast.FunctionDef, node: ast.expr, role: RoleOf) -> Tuple[Condition, ...]:
    """Return the conditions, among those that the module alone decides, under which a method computes an expression."""
    parting = _Parting(function, role)

    def of(block: List[ast.stmt]) -> Optional[Tuple[Condition, ...]]:
        for statement in block:
            if not any(part is node for part in ast.walk(statement)):
                continue
            for _, field in ast.iter_fields(statement):
                inner = of(field) if isinstance(field, list) and field and isinstance(field[0], ast.stmt) else None
                if inner is not None:
                    asked = ((statement.test, field is statement.body),) if parting.asks_module(statement) else ()
                    return (*asked, *inner)
            return ()
        return None

    return of(function.body) or ()


def unmet(conditions: Tuple[Condition, ...], function: FunctionType, module: Any) -> Optional[str]:
    """Return the source of a condition that currently keeps a method out of a branch; None if none is known."""
    for test, wanted in conditions:
        found = _value(test, function, module)
        if found not in (None, wanted):
            return ast.unparse(test) if found else f"not {ast.unparse(test)}"
    return None


def _value(test: ast.expr, function: FunctionType, module: Any) -> Optional[bool]:
    """Return the value of a condition in a method; None if finding it would run user code."""
    try:
        return Evaluation(module).truth(test, function)
    except NotProved:
        return None


class _Parting:
    def __init__(self, function: ast.FunctionDef, role: RoleOf) -> None:
        self._function = function
        self._first = [*function.args.posonlyargs, *function.args.args][0].arg
        arguments = {part.arg for part in ast.walk(function.args) if isinstance(part, ast.arg)}
        self._local = bound(function) | arguments
        self._role, self._may_call = role, harmless_calls(role)

    def spread(self) -> ast.FunctionDef:
        """Turn each condition inside an expression of the method into an if statement, and return the method."""
        for block in list(blocks(self._function)):
            block[:] = map(self._spread, block)
        return self._function

    def _spread(self, statement: ast.stmt) -> ast.stmt:
        """Wrap a statement in an if on the condition in its expression, if the condition can be moved."""
        value = statement.value if isinstance(statement, (ast.Assign, ast.Return)) else None
        dim = self._dim(value)
        if isinstance(value, ast.IfExp):
            test, branches = value.test, (value.body, value.orelse)
        elif dim is not None:
            test = ast.Compare(dim, [ast.Eq()], [ast.Constant(-1)])
            chunk, asked = copy.deepcopy((value, dim))
            branches = (replace(chunk, asked, ast.Constant(-1)), value)
        else:
            return statement
        both = [copy.copy(statement) for _ in branches]
        for each, branch in zip(both, branches):
            each.value = branch
        made = ast.copy_location(ast.If(test, [both[0]], [both[1]]), statement)
        return made if self.asks_module(made) else statement

    def _dim(self, value: Optional[ast.expr]) -> Optional[ast.Attribute]:
        """Return the attribute of the module that holds the dimension to halve."""
        if not (isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "chunk"):
            return None
        given = [*value.args[-1:], *(word.value for word in value.keywords if word.arg == "dim")]
        own = (node for node in given if isinstance(node, ast.Attribute) and is_name(node.value, self._first))
        return next(own, None)

    def part(self, block: List[ast.stmt], answers: Dict[str, bool]) -> bool:
        """Move conditions in front of the statements that lead to a block's first MLP; False if there are none."""
        start = self._start(block, answers)
        if start is None:
            return False
        behind = block[start:]
        guards, taken = self._decided(behind, answers)
        if not guards or not taken:
            return False
        otherwise = behind
        if len(guards) == 1:  # the other branch has no conditions either
            ((text, (_, is_so)),) = guards.items()
            _, otherwise = self._decided(behind, {text: not is_so})
        asked = [test if is_so else ast.UnaryOp(ast.Not(), test) for test, is_so in guards.values()]
        test = asked[0] if len(asked) == 1 else ast.BoolOp(ast.And(), asked)
        block[start:] = [ast.copy_location(ast.If(test, taken, otherwise), behind[0])]
        return True

    def _start(self, block: List[ast.stmt], answers: Dict[str, bool]) -> Optional[int]:
        for index, statement in enumerate(block):
            if not any(self._role(callee) in _STARTS for callee in _callees(statement)):
                continue
            while index > 0 and all(map(self._is_near, self._taken(block[index - 1], answers))):
                index -= 1
            return index if self._is_near(statement) or self.asks_module(statement) else None
        return None

    def _taken(self, statement: ast.stmt, answers: Dict[str, bool]) -> List[ast.stmt]:
        """Return the statements that run in place of one, given the values of conditions."""
        if not self.asks_module(statement):
            return [statement]
        test, positive = _without_not(statement.test)
        is_so = answers.get(ast.unparse(test))
        if is_so is None:
            return [statement]
        taken = statement.body if is_so == positive else statement.orelse
        return [part for each in taken for part in self._taken(each, answers)]

    def _decided(
        self, statements: List[ast.stmt], answers: Dict[str, bool]
    ) -> Tuple[Dict[str, Condition], List[ast.stmt]]:
        """Return the conditions in statements that ``answers`` decides, by text, and the statements that then run."""
        taken, guards, index = copy.deepcopy(statements), {}, 0
        while index < len(taken):
            statement = taken[index]
            test, positive = _without_not(statement.test) if isinstance(statement, ast.If) else (statement, True)
            is_so = answers.get(ast.unparse(test)) if self.asks_module(statement) else None
            if is_so is not None:
                guards[ast.unparse(test)] = test, is_so
                taken[index : index + 1] = statement.body if is_so == positive else statement.orelse
            elif self._is_near(statement):
                index += 1
            else:
                break
        return guards, taken

    def asks_module(self, statement: ast.stmt) -> bool:
        """True if the condition of a statement depends only on attributes of the module, their classes, or flags."""
        if not isinstance(statement, ast.If):
            return False
        for part in ast.walk(statement.test):
            if isinstance(part, ast.Name):
                fits = part.id == self._first or part.id not in self._local
            elif isinstance(part, ast.Call):
                asked = self._role(part.func)
                fits = not part.keywords and (asked == Role.ASKING or (asked == Role.FLAG and not part.args))
            else:
                fits = isinstance(part, _PLAIN)
            if not fits:
                return False
        return True

    def _is_near(self, statement: ast.stmt) -> bool:
        if not (isinstance(statement, SIMPLE) or self.asks_module(statement)):
            return False
        return not _stores(statement) and all(
            self._may_call(callee) or self._role(callee) in _NEAR for callee in _callees(statement)
        )


def _callees(statement: ast.stmt) -> List[ast.expr]:
    return [part.func for part in ast.walk(statement) if isinstance(part, ast.Call)]


def _stores(statement: ast.stmt) -> bool:
    """True if a statement stores or deletes an attribute or an item."""
    owned = (part for part in ast.walk(statement) if isinstance(part, (ast.Attribute, ast.Subscript)))
    return any(isinstance(part.ctx, (ast.Store, ast.Del)) for part in owned)


def _without_not(test: ast.expr) -> Tuple[ast.expr, bool]:
    """Strip a leading ``not`` from a condition; the flag is True if there was none."""
    is_negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
    return (test.operand, False) if is_negated else (test, True)
