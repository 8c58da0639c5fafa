"""Functions and their syntax trees, both ways."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Callable, Dict, List, Optional, Tuple

from torch import nn

_INSTEAD = "method_instead"  # the name by which a changed method asks whether another is to run in its place


@functools.cache
def tree_of(function: FunctionType) -> Optional[ast.FunctionDef]:
    """The definition of a function; None where it cannot be had, or is not certainly what the function runs."""
    try:
        lines, first = inspect.getsourcelines(function.__code__)
        # A method parses as it is indented, in a block: dedenting would change the strings in it.
        head = "if True:\n" if lines[0][:1].isspace() else "if True: pass\n"
        nodes = ast.walk(ast.parse("".join([head, *lines])))
    except (OSError, TypeError, SyntaxError):
        return None
    definition = next((node for node in nodes if isinstance(node, ast.FunctionDef)), None)
    if definition is None or not definition.args.args:
        return None
    definition.decorator_list = []  # what they make of it is another function
    first_name = definition.args.args[0].arg
    for node in ast.walk(definition):
        rebinds = isinstance(node, ast.Name) and node.id == first_name and not isinstance(node.ctx, ast.Load)
        if rebinds or isinstance(node, (ast.Global, ast.Nonlocal)):
            return None
    ast.increment_lineno(definition, first - 2)
    code = _compiled(definition, function, ())
    return definition if _content(code) == _content(function.__code__) else None


def function_of(
    definition: ast.FunctionDef,
    original: FunctionType,
    names: Dict[str, Any],
    instead: Callable[[Any], Optional[Callable[..., Any]]],
) -> FunctionType:
    """The function that a changed definition of a method makes.

    It sees ``names`` beside what the original sees. Where ``instead(self)`` is a function, it calls that, and does
    nothing else.
    """
    names = {**names, _INSTEAD: instead}
    definition.body.insert(0, _call_of_another(definition))
    code = _compiled(definition, original, tuple(names))
    cells = dict(zip(original.__code__.co_freevars, original.__closure__ or ()))
    cells.update({name: CellType(value) for name, value in names.items()})
    closure = tuple(cells[name] for name in code.co_freevars)
    return _like(original, code, closure)


def inside(function: FunctionType) -> Optional[FunctionType]:
    """What a decorator's function stands around: functools.wraps says so, and its closure holds it."""
    inner = getattr(function, "__wrapped__", None)
    held = any(_holds(cell, inner) for cell in function.__closure__ or ())
    return inner if held and isinstance(inner, FunctionType) else None


@functools.cache
def around(function: FunctionType, inner: FunctionType, other: FunctionType) -> FunctionType:
    """A decorator's function as it is, but around ``other`` in place of ``inner``."""
    closure = tuple(CellType(other) if _holds(cell, inner) else cell for cell in function.__closure__ or ())
    made = _like(function, function.__code__, closure)
    made.__wrapped__ = inner
    return made


def _holds(cell: CellType, value: Any) -> bool:
    return cell != CellType() and cell.cell_contents is value  # an empty cell equals a new one, and has no contents


def value_of(node: ast.expr, function: FunctionType, first: Any) -> Any:
    """What names and attributes in a function stand for, given its first argument; None where that is not known."""
    if isinstance(node, ast.Attribute):
        owner = value_of(node.value, function, first)
        if isinstance(owner, nn.Module):  # not its properties, which may do anything
            method = getattr(type(owner), node.attr, None)
            method = MethodType(method, owner) if isinstance(method, FunctionType) else None
            return owner._modules.get(node.attr, vars(owner).get(node.attr, method))
        return getattr(owner, node.attr, None) if isinstance(owner, ModuleType) else None
    if not isinstance(node, ast.Name):
        return None
    code = function.__code__
    if node.id in (*code.co_varnames, *code.co_cellvars):
        return first if code.co_argcount and node.id == code.co_varnames[0] else None
    if node.id in code.co_freevars:
        cell = function.__closure__[code.co_freevars.index(node.id)]
        return cell.cell_contents
    return function.__globals__.get(node.id, getattr(builtins, node.id, None))


def values_of(node: ast.expr, function: FunctionType, first: Any) -> Dict[str, Any]:
    """:func:`value_of` by the name that the value has; all values, where a loop over a list of modules gives them."""
    loops = _loops(function)
    if isinstance(node, ast.Name) and node.id in loops:
        parts = value_of(loops[node.id], function, first)
        path = ast.unparse(loops[node.id]).partition(".")[2]
        return {f"{path}.{k}": part for k, part in enumerate(parts)} if isinstance(parts, nn.ModuleList) else {}
    return {ast.unparse(node).partition(".")[2] or ast.unparse(node): value_of(node, function, first)}


@functools.cache
def _loops(function: FunctionType) -> Dict[str, ast.expr]:
    """What is looped over, by the names of variables that are nothing but loop variables."""
    found: Dict[str, ast.expr] = {}
    tree = tree_of(function)
    nodes = [] if tree is None else list(ast.walk(tree))
    stored = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    for loop in (node for node in nodes if isinstance(node, ast.For)):
        target, over = loop.target, loop.iter
        if isinstance(over, ast.Call) and ast.unparse(over.func) == "enumerate" and isinstance(target, ast.Tuple):
            target, over = target.elts[-1], over.args[0]
        if isinstance(target, ast.Name) and stored.count(target.id) == 1:
            found[target.id] = over
    return found


def _like(original: FunctionType, code: CodeType, closure: Tuple[CellType, ...]) -> FunctionType:
    """A function that differs from the original in its code and its closure alone, and wraps it."""
    made = FunctionType(code, original.__globals__, original.__name__, original.__defaults__, closure)
    return functools.update_wrapper(made, original, assigned=(*functools.WRAPPER_ASSIGNMENTS, "__kwdefaults__"))


def _call_of_another(definition: ast.FunctionDef) -> ast.stmt:
    arguments = definition.args
    given = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    given += [] if arguments.vararg is None else [f"*{arguments.vararg.arg}"]
    given += [f"{argument.arg}={argument.arg}" for argument in arguments.kwonlyargs]
    given += [] if arguments.kwarg is None else [f"**{arguments.kwarg.arg}"]
    text = f"if {_INSTEAD}({given[0]}): return {_INSTEAD}({given[0]})({', '.join(given)})"
    statement = ast.parse(text).body[0]
    return ast.increment_lineno(statement, definition.lineno - 1)


def _compiled(definition: ast.FunctionDef, original: FunctionType, names: Tuple[str, ...]) -> CodeType:
    """The code of a definition; the free names of the original, and ``names``, are those of a function around it."""
    text = f"def around({', '.join((*original.__code__.co_freevars, *names))}): pass"
    # A call of an attribute compiles differently where its owner was imported, if only under some condition.
    imported = [name for name in original.__code__.co_names if _is_imported(name, original)]
    outer = ast.parse("\n".join((text, *(f"import {name}" for name in imported))))
    outer.body[0].body = [definition]
    ast.fix_missing_locations(outer)
    flags = original.__code__.co_flags & annotations.compiler_flag
    code = compile(outer, original.__code__.co_filename, "exec", flags=flags, dont_inherit=True)
    for name in ("around", definition.name):  # by name: Python 3.14 has code for annotations beside it
        code = next(part for part in code.co_consts if isinstance(part, CodeType) and part.co_name == name)
    return code


def _is_imported(name: str, function: FunctionType) -> bool:
    if name not in function.__globals__:
        return not hasattr(builtins, name)
    found = function.__globals__[name]
    return isinstance(found, ModuleType) or getattr(found, "__module__", function.__module__) != function.__module__


def _content(code: CodeType) -> List[Any]:
    """What decides what code does, and its functions' code."""
    constants = [_content(value) if isinstance(value, CodeType) else repr(value) for value in code.co_consts]
    return [code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, constants]
