"""Conditions on a module's own attributes that stand inside of an MLP or its block, moved in front of it.

    x = self.mlp(self.norm(x))              if self.scaled:
    if self.scaled:                             x = self.mlp(self.norm(x))
        x = self.scale * x                      x = self.scale * x
    return residual + x                         return residual + x
                                            else:
                                                x = self.mlp(self.norm(x))
                                                return residual + x

Each branch is then code without conditions, in which a block is found. Each condition that is moved doubles the code,
so where there are more than two, all become one: if they are what they were when the module was fused, the code runs
that ran then, without conditions, and else the code as it was written. A condition that a branch has decided already is
not asked again in it. A question such as ``is_torch_npu_available()`` is moved too, if it does no more than to return a
global.
``h = a if self.flag else b`` is such a condition, and so is whether ``self.dim`` in ``h.chunk(2, dim=self.dim)`` is -1.
"""

from __future__ import annotations

import ast
import copy
import operator
from types import FunctionType
from typing import Any, Dict, Iterator, List, Optional, Tuple

import torch

from ..parts.roles import Role, RoleOf, harmless_calls
from ..reading.attributes import attribute_of, is_module
from ..reading.effects import bound
from ..reading.names import SIMPLE, blocks, is_name
from ..reading.source import tree_of, value_of
from .substitution import replace

Condition = Tuple[ast.expr, bool]  # a test, and what it has to be

_MOST = 2  # conditions that are moved: each doubles the code

# What a condition may be made of, beside names.
_PLAIN = (ast.Attribute, ast.Constant, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.expr_context)
_PLAIN += (ast.unaryop, ast.boolop, ast.cmpop)

# What a condition may be moved over. Another call, such as an attention's, may change what the condition asks for.
_NEAR = {Role.WHOLE, Role.PROJECTION, Role.NORM, Role.SCALE, Role.PASSING, Role.DROPOUT, Role.ASKING, Role.FLAG}
_STARTS = {Role.WHOLE, Role.PROJECTION}  # what an MLP in a method begins with


Answers = Tuple[Tuple[str, bool], ...]  # conditions as source, and what they are of a module


def parted(function: ast.FunctionDef, role: RoleOf, answers: Answers) -> Iterator[ast.FunctionDef]:
    """Copies of a method: with all conditions of ``answers`` moved as one, with one condition moved, and with two.

    Copies in which nothing could be moved are left out.
    """
    for most in (None, *range(1, _MOST + 1)):
        parting = _Parting(copy.deepcopy(function), role)
        made = parting.spread()
        inner_first = reversed(list(blocks(made)))
        if any([parting.part(block, most, dict(answers)) for block in inner_first]):
            yield made


def many_conditions(function: ast.FunctionDef, role: RoleOf) -> Tuple[ast.expr, ...]:
    """The conditions that can be told from a method's module alone, where they are more than are moved one by one."""
    parting = _Parting(copy.deepcopy(function), role)
    statements = [statement for block in blocks(parting.spread()) for statement in block]
    tests = {ast.unparse(each.test): each.test for each in statements if parting.is_settled(each)}
    return tuple(tests.values()) if len(tests) > _MOST else ()


def answers_of(conditions: Tuple[ast.expr, ...], function: FunctionType, module: Any) -> Answers:
    """What conditions are of a module as it is; without those that raise."""
    found = ((ast.unparse(test), _value(test, function, module)) for test in conditions)
    return tuple((text, value) for text, value in found if value is not None)


def conditions_of(function: ast.FunctionDef, node: ast.expr, role: RoleOf) -> Tuple[Condition, ...]:
    """The conditions under which a method computes an expression, of those that can be told from its module alone."""
    parting = _Parting(function, role)

    def of(block: List[ast.stmt]) -> Optional[Tuple[Condition, ...]]:
        for statement in block:
            if not any(part is node for part in ast.walk(statement)):
                continue
            for _, field in ast.iter_fields(statement):
                inner = of(field) if isinstance(field, list) and field and isinstance(field[0], ast.stmt) else None
                if inner is not None:
                    settled = ((statement.test, field is statement.body),) if parting.is_settled(statement) else ()
                    return (*settled, *inner)
            return ()
        return None

    return of(function.body) or ()


def unmet(conditions: Tuple[Condition, ...], function: FunctionType, module: Any) -> Optional[str]:
    """The condition that keeps a method from a branch now, as source; None where there is none, or nobody can tell."""
    for test, wanted in conditions:
        found = _value(test, function, module)
        if found not in (None, wanted):
            return ast.unparse(test) if found else f"not {ast.unparse(test)}"
    return None


def _value(test: ast.expr, function: FunctionType, module: Any) -> Optional[bool]:
    """What a condition in a method is of a module; None where that is not known without running code of classes."""
    try:
        return bool(_computed(test, function, module))
    except (_UnknownError, TypeError):  # what cannot be compared raises in the method too
        return None


class _UnknownError(Exception):
    pass


_PLAIN_VALUES = (bool, int, float, str, type(None), torch.dtype)  # to compare them runs no code of another class
_OPERATORS = {ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le}
_OPERATORS.update({ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not})


def _computed(node: ast.expr, function: FunctionType, module: Any) -> Any:
    """The value of a condition, which is of a plain type."""
    if isinstance(node, ast.BoolOp):
        values = (_computed(part, function, module) for part in node.values)
        return all(values) if isinstance(node.op, ast.And) else any(values)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return not _computed(node.operand, function, module)
    if isinstance(node, ast.Compare) and all(type(op) in _OPERATORS for op in node.ops):
        by_identity = all(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops)
        compute = _held if by_identity else _computed
        parts = [compute(part, function, module) for part in (node.left, *node.comparators)]
        return all(_OPERATORS[type(op)](*pair) for op, pair in zip(node.ops, zip(parts, parts[1:])))
    value = _held(node, function, module)
    if is_module(value) and not any(hasattr(type(value), name) for name in ("__bool__", "__len__")):
        return True
    if type(value) not in _PLAIN_VALUES:
        raise _UnknownError
    return value


def _held(node: ast.expr, function: FunctionType, module: Any) -> Any:
    """What a path of names, a number, a flag or a question for a class stands for."""
    if isinstance(node, ast.Attribute):
        found = attribute_of(_held(node.value, function, module), node.attr, _UnknownError)
    elif isinstance(node, ast.Call):
        found = _answer(*(_held(part, function, module) for part in (node.func, *node.args)))
    elif isinstance(node, ast.Name) and node.id in function.__code__.co_varnames[1:]:
        found = _UnknownError
    else:
        found = value_of(node, function, module)
    if found is _UnknownError:
        raise _UnknownError
    return found


def _answer(callee: Any, *given: Any) -> Any:
    """What isinstance says, or a function that returns a global."""
    if callee is isinstance and len(given) == 2 and type(given[1]) is type:
        return issubclass(type(given[0]), given[1])
    tree = tree_of(callee) if type(callee) is FunctionType and not given else None
    return _UnknownError if tree is None else value_of(tree.body[-1].value, callee, None)


class _Parting:
    def __init__(self, function: ast.FunctionDef, role: RoleOf) -> None:
        self._function = function
        self._first = [*function.args.posonlyargs, *function.args.args][0].arg
        arguments = {part.arg for part in ast.walk(function.args) if isinstance(part, ast.arg)}
        self._local = bound(function) | arguments
        self._role, self._may_call = role, harmless_calls(role)

    def spread(self) -> ast.FunctionDef:
        """The method, with an if statement in the place of each condition inside of an expression."""
        for block in list(blocks(self._function)):
            block[:] = map(self._spread, block)
        return self._function

    def _spread(self, statement: ast.stmt) -> ast.stmt:
        """A statement with the condition that is in its expression around it, if that can be moved."""
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
        return made if self.is_settled(made) else statement

    def _dim(self, value: Optional[ast.expr]) -> Optional[ast.Attribute]:
        """The attribute of the module that says which dimension is halved."""
        if not (isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "chunk"):
            return None
        given = [*value.args[-1:], *(word.value for word in value.keywords if word.arg == "dim")]
        own = (node for node in given if isinstance(node, ast.Attribute) and is_name(node.value, self._first))
        return next(own, None)

    def part(self, block: List[ast.stmt], most: Optional[int], answers: Dict[str, bool]) -> bool:
        """Moves conditions in front of the statements that lead to a block's first MLP; whether there were any.

        Up to ``most`` of them, or where that is None all of ``answers`` as one.
        """
        start = self._start(block, {} if most is not None else answers)
        if start is None:
            return False
        behind = block[start:]
        block[start:] = self._as_answered(behind, answers) if most is None else self._branches(behind, most)
        return block[start:] != behind

    def _start(self, block: List[ast.stmt], answers: Dict[str, bool]) -> Optional[int]:
        for index, statement in enumerate(block):
            if not any(self._role(callee) in _STARTS for callee in _callees(statement)):
                continue
            while index > 0 and all(map(self._is_near, self._taken(block[index - 1], answers))):
                index -= 1
            return index if self._is_near(statement) or self.is_settled(statement) else None
        return None

    def _taken(self, statement: ast.stmt, answers: Dict[str, bool]) -> List[ast.stmt]:
        """The statements that run in the place of one where conditions are as ``answers`` say."""
        is_so = answers.get(ast.unparse(statement.test)) if self.is_settled(statement) else None
        if is_so is None:
            return [statement]
        return [part for each in (statement.body if is_so else statement.orelse) for part in self._taken(each, answers)]

    def _branches(self, statements: List[ast.stmt], most: int) -> List[ast.stmt]:
        for statement in statements if most > 0 else ():
            if self.is_settled(statement):
                both = [self._decided(copy.deepcopy(statements), statement.test, value) for value in (True, False)]
                branches = (self._branches(each, most - 1) for each in both)
                return [ast.copy_location(ast.If(statement.test, *branches), statement)]
            if not self._is_near(statement):
                break
        return statements

    def _as_answered(self, statements: List[ast.stmt], answers: Dict[str, bool]) -> List[ast.stmt]:
        """An if statement that asks for ``answers``: with what runs where they are so, and else with the statements."""
        taken, guards, index = copy.deepcopy(statements), {}, 0
        while index < len(taken):
            statement = taken[index]
            is_so = answers.get(ast.unparse(statement.test)) if self.is_settled(statement) else None
            if is_so is not None:
                guard = statement.test if is_so else ast.UnaryOp(ast.Not(), statement.test)
                guards[ast.unparse(statement.test)] = guard
                taken[index : index + 1] = statement.body if is_so else statement.orelse
            elif self._is_near(statement):
                index += 1
            else:
                break
        if len(guards) <= _MOST:
            return statements
        return [
            ast.copy_location(ast.If(ast.BoolOp(ast.And(), list(guards.values())), taken, statements), statements[0])
        ]

    def _decided(self, statements: List[ast.stmt], condition: ast.expr, value: bool) -> List[ast.stmt]:
        """The statements that run where a condition has this value: without those under the opposite."""
        wanted, is_so = _without_not(condition)
        for index, statement in enumerate(statements):
            asked, is_asked_so = _without_not(statement.test) if isinstance(statement, ast.If) else ("", True)
            if asked == wanted:
                taken = statement.body if value == (is_asked_so == is_so) else statement.orelse
                return [*statements[:index], *self._decided([*taken, *statements[index + 1 :]], condition, value)]
            if not self._is_near(statement):
                break
        return statements

    def is_settled(self, statement: ast.stmt) -> bool:
        """Whether a statement has a condition that the attributes of the module decide, or their classes, or flags."""
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
        if not (isinstance(statement, SIMPLE) or self.is_settled(statement)):
            return False
        return not _stores(statement) and all(
            self._may_call(callee) or self._role(callee) in _NEAR for callee in _callees(statement)
        )


def _callees(statement: ast.stmt) -> List[ast.expr]:
    return [part.func for part in ast.walk(statement) if isinstance(part, ast.Call)]


def _stores(statement: ast.stmt) -> bool:
    """Whether a statement changes an attribute or an item of something."""
    owned = (part for part in ast.walk(statement) if isinstance(part, (ast.Attribute, ast.Subscript)))
    return any(isinstance(part.ctx, (ast.Store, ast.Del)) for part in owned)


def _without_not(condition: ast.expr) -> Tuple[str, bool]:
    """The source of a condition without the ``not`` in front of it, and whether there is none."""
    if isinstance(condition, ast.UnaryOp) and isinstance(condition.op, ast.Not):
        return ast.unparse(condition.operand), False
    return ast.unparse(condition), True
