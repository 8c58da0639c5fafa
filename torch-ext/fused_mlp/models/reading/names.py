"""Names in a function, and the values that were bound to them.

A name is resolved only if a single assignment certainly bound it.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import FrozenSet, Iterator, List, Optional, Set, Tuple

from .effects import bound, uses

# Statements that may contain an MLP, and those that contain blocks of such statements.
SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Expr)
_COMPOUND = (ast.FunctionDef, ast.If, ast.For, ast.While, ast.With)

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_SCOPES += (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

# Nodes that may leave a block early while the function continues: a context manager may suppress an exception.
_LEAVING = (ast.Break, ast.Continue, ast.With, ast.AsyncWith, ast.Try, getattr(ast, "TryStar", ast.Try))


@dataclass(frozen=True)
class Place:
    """A statement, with its block and its function."""

    function: ast.FunctionDef
    block: List[ast.stmt]
    index: int


@dataclass(frozen=True)
class Value:
    """An expression, the place where it is evaluated, and the names that were resolved to reach it.

    ``half`` is the index of the half of the expression's last dimension that is meant; None for the whole.
    """

    node: ast.expr
    place: Place
    read: FrozenSet[ast.Name] = frozenset()
    half: Optional[int] = None

    def part(self, node: ast.expr) -> Value:
        """Return a part of this expression, with its name resolved."""
        return _follow(Value(node, self.place, self.read))


def _follow(value: Value) -> Value:
    """Resolve a name, or half of a chunked tensor, to the expression bound to it; return the value itself if unsure."""
    node, place, half = value.node, value.place, None
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and node.slice.value in (0, 1):
        node, half = node.value, node.slice.value
    if not isinstance(node, ast.Name):
        return value
    for index in range(place.index - 1, -1, -1):
        statement = place.block[index]
        if node.id not in bound(statement):
            continue
        target, given = assignment(statement)
        there, read = Place(place.function, place.block, index), value.read | {node}
        if isinstance(target, ast.Tuple) and half is None and len(target.elts) == 2:
            half = next((k for k in (0, 1) if is_name(target.elts[k], node.id)), None)
            if half is None:
                return value
        elif given is None or not is_name(target, node.id):
            return value
        if half is None:
            return _follow(Value(given, there, read))
        source = _chunked(given)
        whole = None if source is None else _follow(Value(source, there, read))
        return value if whole is None or whole.half is not None else Value(whole.node, whole.place, whole.read, half)
    return value


def _chunked(node: ast.expr) -> Optional[ast.expr]:
    """Return the tensor in ``tensor.chunk(2, dim=-1)`` or ``torch.chunk(tensor, 2, dim=-1)``."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "chunk"):
        return None
    tensor, sizes = node.func.value, list(node.args)
    if is_name(tensor, "torch") and sizes:
        tensor = sizes.pop(0)
    given = [*zip(("chunks", "dim"), sizes), *((word.arg, word.value) for word in node.keywords)]
    named = {name: ast.unparse(size) for name, size in given}
    return tensor if len(given) == 2 and named == {"chunks": "2", "dim": "-1"} else None


def reads_of(name: str, place: Place) -> Optional[Set[ast.Name]]:
    """Return the nodes that may read the value that a statement binds to a name; None if that cannot be determined."""
    for scope in ast.walk(place.function):
        if isinstance(scope, _SCOPES) and scope is not place.function and uses(scope, name):
            return None
    inner = place.block is not place.function.body
    is_left = inner and any(isinstance(part, _LEAVING) for part in ast.walk(place.function))
    later: List[ast.stmt] = []
    for statement in place.block[place.index + 1 :]:
        later.append(statement)
        target, given = assignment(statement)
        if given is not None and name in bound(target) and not is_left:
            break  # reads in the value come first
    else:
        if inner and not _used(name, _after_block(place.function.body, place.block)) <= _used(name, later):
            return None
    return _used(name, later)


def _used(name: str, statements: List[ast.stmt]) -> Set[ast.Name]:
    return set().union(*(uses(statement, name) for statement in statements))


def _after_block(statements: List[ast.stmt], block: List[ast.stmt]) -> Optional[List[ast.stmt]]:
    """Return the statements that may run after a block in one of these statements; None if none of them contains it.

    These are the statements after those that contain the block; for a loop also the whole loop, for its next iteration.
    """
    if statements is block:
        return []
    for index, statement in enumerate(statements):
        for _, field in ast.iter_fields(statement):
            after = _after_block(field, block) if isinstance(field, list) else None
            if after is not None:
                loop = [statement] if isinstance(statement, (ast.For, ast.AsyncFor, ast.While)) else []
                return [*loop, *after, *statements[index + 1 :]]
    return None


def body_of(function: ast.FunctionDef) -> List[ast.stmt]:
    """Return the statements of a function after its docstring."""
    return function.body[int(ast.get_docstring(function, clean=False) is not None) :]


def assignment(statement: ast.stmt) -> Tuple[Optional[ast.expr], Optional[ast.expr]]:
    """Return target and value of a statement that is a single assignment."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        return statement.targets[0], statement.value
    if isinstance(statement, ast.AnnAssign):
        return statement.target, statement.value
    return None, None


def blocks(node: ast.AST) -> Iterator[List[ast.stmt]]:
    """Yield the lists of statements of a function, without those of nested functions."""
    for _, field in ast.iter_fields(node):
        if isinstance(field, list) and field and isinstance(field[0], ast.stmt):
            yield field
            for child in field:
                if isinstance(child, _COMPOUND) and not isinstance(child, _SCOPES):
                    yield from blocks(child)


def expressions(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions of a statement itself, outermost first."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr) and not isinstance(child, _SCOPES):
            yield child
            yield from expressions(child)
        elif isinstance(child, ast.keyword):
            yield from expressions(child)


def is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
