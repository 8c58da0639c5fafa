"""Conversion between functions and their syntax trees."""

from __future__ import annotations
import __future__

import ast
import builtins
import functools
import linecache
import sys
import warnings
from collections import Counter
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple, Union

import torch
from torch import nn

from .attributes import attribute_of, children_of, is_module, state_of

_FUTURES = functools.reduce(
    int.__or__, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
)

_trees: Dict[Tuple[CodeType, str], Optional[ast.FunctionDef]] = {}


_Definitions = List[Tuple[ast.FunctionDef, CodeType]]


def remembered(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Like ``functools.cache``, but also keyed by code and defaults of functions: notebooks replace them in place."""
    known: Dict[Tuple[Any, ...], Tuple[Any, List[Any]]] = {}

    @functools.wraps(compute)
    def call(*args: Any) -> Any:
        functions = (arg for arg in args if type(arg) is FunctionType)
        parts = [part for each in functions for part in (each.__code__, each.__defaults__, each.__kwdefaults__)]
        key = (*args, *map(id, parts))
        if key not in known:
            known[key] = compute(*args), parts  # kept alive, so that their ids stay theirs
        return known[key][0]

    return call


def tree_of(function: FunctionType) -> Optional[ast.FunctionDef]:
    """Return the definition of a function; None if it is not available or not certainly the code that runs."""
    code = function.__code__
    key = (code, code.co_filename)  # equal codes may be in several files
    if key not in _trees:
        linecache.checkcache(code.co_filename)
        lines = linecache.getlines(code.co_filename, function.__globals__)
        _trees[key] = _definition(code, "".join(lines)) if lines else None
    return _trees[key]


class LookUp(NamedTuple):
    """A name that a function looks up outside itself, such as ``F.dropout``, with its value and the attributes used."""

    node: ast.expr
    value: Any
    attributes: Tuple[Tuple[Any, str, Any], ...]


def not_looked_up(changed: ast.FunctionDef, function: FunctionType) -> List[LookUp]:
    """Return the known values that a function looks up and a changed definition of it does not, or less often."""
    still = Counter(ast.unparse(node) for statement in changed.body for node in _paths(statement))
    paths = [node for statement in tree_of(function).body for node in _paths(statement)]
    nodes, before = {ast.unparse(node): node for node in paths}, Counter(map(ast.unparse, paths))
    found = (_look_up(node, function) for text, node in nodes.items() if still[text] < before[text])
    return [each for each in found if each is not None]


def read_of(function: FunctionType, *changed: ast.FunctionDef) -> Tuple[Tuple[Any, str, Any], ...]:
    """Return the attributes that changed definitions of a function depend on: owner, name and value."""
    looked_up = (each for tree in changed for found in not_looked_up(tree, function) for each in found.attributes)
    return ((function, "__code__", function.__code__), *looked_up)


def _paths(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the longest dotted paths of names in a node."""
    if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
        root = node
        while isinstance(root, ast.Attribute):
            root = root.value
        if isinstance(root, ast.Name):
            yield node
            return
    for child in ast.iter_child_nodes(node):
        yield from _paths(child)


def _look_up(node: ast.expr, function: FunctionType) -> Optional[LookUp]:
    value = value_of(node, function, None)
    if isinstance(node, ast.Attribute):
        owner = _look_up(node.value, function)
        if owner is None or value is None:
            return None
        made_anew = type(value) is MethodType  # new at each look-up
        return LookUp(node, value, (*owner.attributes, *(() if made_anew else ((owner.value, node.attr, value),))))
    code = function.__code__
    if node.id in code.co_freevars and value is not None:
        return LookUp(node, value, ((function.__closure__[code.co_freevars.index(node.id)], "cell_contents", value),))
    home = sys.modules.get(function.__module__)
    owner = home if home is not None and vars(home) is function.__globals__ else function.__globals__
    is_global = value is not None and function.__globals__.get(node.id) is value
    return LookUp(node, value, ((owner, node.id, value),)) if is_global else None


def inside(function: FunctionType) -> Optional[FunctionType]:
    """Return the function that a decorator's function wraps, if functools.wraps marks it and the closure holds it."""
    inner = getattr(function, "__wrapped__", None)
    held = any(is_held(cell, inner) for cell in function.__closure__ or ())
    return inner if held and isinstance(inner, FunctionType) else None


def is_held(cell: CellType, value: Any) -> bool:
    """True if a function's cell contains this object."""
    return cell != CellType() and cell.cell_contents is value  # an empty cell equals a new one, and has no contents


def value_of(node: ast.expr, function: FunctionType, first: Any) -> Any:
    """Return the value of a name or an attribute in a function, given its first argument; None if it is unknown."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Attribute):
        owner = value_of(node.value, function, first)
        if is_module(owner):
            return attribute_of(owner, node.attr)
        if isinstance(owner, ModuleType):
            return vars(owner).get(node.attr)
        if type(owner).__getattribute__ is object.__getattribute__ and node.attr in state_of(owner):  # a configuration
            value = attribute_of(owner, node.attr)
            return value if type(value) in (bool, int, float, str) else None
        of_autograd = isinstance(owner, type) and issubclass(owner, torch.autograd.Function) and node.attr == "apply"
        return owner.apply if of_autograd else None
    if not isinstance(node, ast.Name):
        return None
    code = function.__code__
    if node.id in (*code.co_varnames, *code.co_cellvars):
        return first if code.co_argcount and node.id == code.co_varnames[0] else None
    if node.id in code.co_freevars:
        cell = function.__closure__[code.co_freevars.index(node.id)]
        return None if cell == CellType() else cell.cell_contents
    return function.__globals__.get(node.id, getattr(builtins, node.id, None))


def values_of(node: ast.expr, function: FunctionType, first: Any) -> Dict[str, Any]:
    """Return :func:`value_of` by the value's name; for a variable of a loop over a list of modules, all its values."""
    tree = tree_of(function)
    loops = {} if tree is None else _loops(tree)
    if isinstance(node, ast.Name) and node.id in loops:
        parts = value_of(loops[node.id], function, first)
        path = ast.unparse(loops[node.id]).partition(".")[2]
        parts = children_of(parts).values() if issubclass(type(parts), nn.ModuleList) else ()
        return {f"{path}.{k}": part for k, part in enumerate(parts)}
    return {ast.unparse(node).partition(".")[2] or ast.unparse(node): value_of(node, function, first)}


@functools.cache
def _loops(tree: ast.FunctionDef) -> Dict[str, ast.expr]:
    """Return the iterables of loops, by the names of variables that are only loop variables."""
    found: Dict[str, ast.expr] = {}
    nodes = list(ast.walk(tree))
    stored = [name for node in nodes for name in bound_names(node)]
    for loop in (node for node in nodes if isinstance(node, ast.For)):
        target, over = loop.target, loop.iter
        if isinstance(over, ast.Call) and ast.unparse(over.func) == "enumerate" and isinstance(target, ast.Tuple):
            target, over = target.elts[-1], over.args[0]
        if isinstance(target, ast.Name) and stored.count(target.id) == 1:
            found[target.id] = over
    return found


# String fields of AST nodes that bind no name. Any other field may, including those of future syntax.
_BINDS_NOTHING = {
    (ast.Attribute, "attr"),
    (ast.Constant, "value"),
    (ast.Constant, "kind"),
    (ast.ImportFrom, "module"),
    (ast.keyword, "arg"),
}


def bound_names(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node itself binds or deletes, or declares to be of another scope."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        return
    for field, value in ast.iter_fields(node):
        for name in value if isinstance(value, list) else [value]:
            if isinstance(name, str) and (type(node), field) not in _BINDS_NOTHING:
                yield name.partition(".")[0]  # import a.b binds a


def compiled(definition: ast.FunctionDef, original: FunctionType, names: Tuple[str, ...]) -> CodeType:
    """Compile a definition in a function whose parameters are the original's free names and ``names``."""
    outer = ast.parse("def around(): pass")
    outer.body[0].args.args = [ast.arg(name) for name in (*original.__code__.co_freevars, *names)]
    outer.body[0].body = [definition]
    ast.fix_missing_locations(outer)
    flags = original.__code__.co_flags & _FUTURES
    code = compile(outer, original.__code__.co_filename, "exec", flags=flags, dont_inherit=True)
    for name in ("around", definition.name):  # by name: Python 3.14 has code for annotations beside it
        code = next(part for part in code.co_consts if isinstance(part, CodeType) and part.co_name == name)
    return code


# A function's definition in a file, or in a cell of a notebook, is the one that compiles to the same code. The code may
# depend on the rest of the file (on its imports, say), so all of it is compiled again.


def _definition(code: CodeType, source: str) -> Optional[ast.FunctionDef]:
    flags = code.co_flags & _FUTURES
    # A file is compiled as a whole; IPython and Python's own prompt compile one statement at a time.
    for line in (None, code.co_firstlineno):
        found = [tree for tree, made in _definitions(source, code.co_filename, flags, line) if made == code]
        if len(found) == 1:
            found[0].decorator_list = []  # a decorated function is another function
            return found[0]
    return None


@functools.lru_cache(maxsize=8)
def _definitions(source: str, filename: str, flags: int, line: Optional[int]) -> _Definitions:
    """Return the definitions in a file with their codes; only those of the top-level statement at ``line`` if given."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they were shown at the first compilation
            tree = compile(source, filename, "exec", flags | ast.PyCF_ONLY_AST, dont_inherit=True)
            if line is not None:
                tree.body = [node for node in tree.body if _first_line(node) <= line <= node.end_lineno]
            codes = list(_codes(compile(tree, filename, "exec", flags, dont_inherit=True)))
    except (SyntaxError, ValueError, RecursionError):
        return []
    by_place: Dict[Tuple[str, int], _Definitions] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            by_place.setdefault((node.name, _first_line(node)), []).append(node)
    found = ((by_place.get((code.co_name, code.co_firstlineno), ()), code) for code in codes)
    return [(*nodes, code) for nodes, code in found if len(nodes) == 1]  # otherwise two definitions share a line


def _codes(code: CodeType) -> Iterator[CodeType]:
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield part
            yield from _codes(part)


def _first_line(node: Union[ast.stmt, ast.FunctionDef]) -> int:
    """Return the first line of a statement's code."""
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
