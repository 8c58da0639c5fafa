"""Functions compiled from changed definitions of methods."""

from __future__ import annotations

import ast
import copy
import functools
from types import CellType, CodeType, FunctionType
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple, Union

from ..reading.attributes import FUSED, Written, written
from ..reading.effects import name_inside
from ..reading.source import LookUp, compiled, not_looked_up, tree_of
from .switching import instead_of

# Names by which a changed method checks if another has to run in its place; no source can contain them.
_INSTEAD, _METHOD, _TYPE, _TRACED, _RUNS_AS_WRITTEN = "@instead", "@original", "@type", "@traced", "@runs as written"
_INNER = "@inner"


class Instead(NamedTuple):
    """The methods that may run in place of a changed one: its original, or one that the class was patched with.

    Without a call, the changed method checks that its module is fused and that the class still has ``method``,
    unchanged. For Dynamo, ``traced``, a module in a cell, runs either of them, with ``memory`` as its first argument
    (None if the method itself has nothing fused). The original also runs if ``runs_as_written``, when given, returns
    True for the first argument, ``self`` and ``gated``, which is a flag or the name of a projection
    (torch-ext/calls/plain_modules.h).

    If the method ``is_inner``, it is inside the function of a decorator, which checks the module and the class.
    """

    method: Written
    traced: CellType
    memory: Optional[str]
    runs_as_written: Optional[Callable[[Any, Any, Union[bool, str]], bool]]
    gated: Union[bool, str]
    is_inner: bool = False


def function_of(
    definition: ast.FunctionDef,
    original: FunctionType,
    names: Dict[str, Any],
    instead: Optional[Instead] = None,
    fused: Optional[ast.FunctionDef] = None,
) -> FunctionType:
    """Compile a changed definition of a method to a function.

    The function sees ``names`` in addition to the names that the original sees. If another method has to run instead,
    it only calls that. ``fused`` is the definition without the code that runs if nothing is fused; it determines which
    names are no longer looked up.
    """
    if instead is not None:
        looked_up = not_looked_up(fused or definition, original)
        attributes = (attribute for each in looked_up for attribute in each.attributes)
        method = instead.method._replace(looked_up=tuple(attributes))
        names = {**names, _INSTEAD: instead_of(method), _METHOD: method.function, _TYPE: type}
        names.update({_TRACED: instead.traced, _RUNS_AS_WRITTEN: instead.runs_as_written})
        names.update({f"@{attribute}": value for attribute, value in method.parts().items()})
        names.update({f"@{ast.unparse(each.node)}": each.value for each in looked_up})
        definition.body[:0] = _calls_of_others(definition, instead, looked_up)
    code = compiled(definition, original, tuple(names))
    cells = dict(zip(original.__code__.co_freevars, original.__closure__ or ()))
    # Dynamo guards on a cell's content once, however many functions share the cell.
    cells.update({name: value if type(value) is CellType else CellType(value) for name, value in names.items()})
    closure = tuple(cells[name] for name in code.co_freevars)
    made = _like(original, code, closure)
    if instead is not None and not instead.is_inner:
        made.__name__ = method.name  # bound methods are pickled by this name
        written[made] = method
    return made


def around(
    outer: FunctionType, inner: FunctionType, changed: FunctionType, instead: Optional[Instead] = None
) -> FunctionType:
    """Return a function that differs from ``outer``, which only calls ``inner``, in calling ``changed`` instead."""
    tree = copy.deepcopy(tree_of(outer))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == name_inside(outer, inner):
            node.id = _INNER
    return function_of(tree, outer, {_INNER: changed}, instead)


def _like(original: FunctionType, code: CodeType, closure: Tuple[CellType, ...]) -> FunctionType:
    """Return a function that differs from the original only in its code and closure.

    It is not marked as a wrapper, as ``functools.wraps`` would do: transformers inspects the signature of a layer's
    method at every call, which must stay as fast.
    """
    made = FunctionType(code, original.__globals__, original.__name__, original.__defaults__, closure)
    for name in (*functools.WRAPPER_ASSIGNMENTS, "__kwdefaults__"):
        if hasattr(original, name):
            setattr(made, name, getattr(original, name))
    vars(made).update(vars(original))
    return made


def _calls_of_others(definition: ast.FunctionDef, instead: Instead, looked_up: List[LookUp]) -> List[ast.stmt]:
    def name(text: str) -> ast.Name:
        return ast.Name(text, ast.Load())

    arguments = definition.args
    given: List[ast.expr] = [name(argument.arg) for argument in (*arguments.posonlyargs, *arguments.args)]
    owner = given[0] if given else ast.Subscript(name(arguments.vararg.arg), ast.Constant(0), ast.Load())
    another = ast.Call(name(_INSTEAD), [owner], [])
    given += [] if arguments.vararg is None else [ast.Starred(name(arguments.vararg.arg), ast.Load())]
    named = [ast.keyword(argument.arg, name(argument.arg)) for argument in arguments.kwonlyargs]
    named += [] if arguments.kwarg is None else [ast.keyword(None, name(arguments.kwarg.arg))]
    method, kind = name(_METHOD), ast.Call(name(_TYPE), [owner], [])
    kept = {f"@{attribute}": ast.Attribute(method, attribute, ast.Load()) for attribute in instead.method.parts()}
    if not instead.is_inner:
        kept[_METHOD] = ast.Attribute(kind, instead.method.name, ast.Load())
    kept.update({f"@{ast.unparse(each.node)}": copy.deepcopy(each.node) for each in looked_up})
    changes = [ast.Compare(found, [ast.IsNot()], [name(value)]) for value, found in kept.items()]
    state = ast.Attribute(owner, "__dict__", ast.Load())
    restored = ast.Compare(ast.Constant(FUSED), [ast.NotIn()], [state])
    is_changed: ast.expr = ast.BoolOp(ast.Or(), [restored, *changes])
    words, recorded = ("is_traced", "run"), [ast.Constant(instead.method.name), method, name(_INSTEAD)]
    if instead.is_inner:
        another, words, recorded = method, ("is_traced", "recorded"), [method]
    else:
        is_changed = ast.BoolOp(ast.And(), [is_changed, another])
    is_traced, run = (ast.Attribute(name(_TRACED), word, ast.Load()) for word in words)
    recorded = [ast.Constant(instead.memory), *recorded, *given]
    statements: List[ast.stmt] = [
        ast.If(ast.Call(is_traced, [], []), [ast.Return(ast.Call(run, recorded, named))], []),
        ast.If(is_changed, [ast.Return(ast.Call(another, given, named))], []),
    ]
    if instead.runs_as_written is not None and len(arguments.posonlyargs) + len(arguments.args) > 1:
        runs_as_written = ast.Call(name(_RUNS_AS_WRITTEN), [given[1], given[0], ast.Constant(instead.gated)], [])
        statements.append(ast.If(runs_as_written, [ast.Return(ast.Call(name(_METHOD), given, named))], []))
    for node in (node for statement in statements for node in ast.walk(statement)):
        ast.copy_location(node, definition)
    return statements
