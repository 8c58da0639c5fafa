"""Methods that run another method on chunks of their inputs, as in transformers' encoders.

transformers' function inspects the signature of the other method at each call, which takes 16 us per layer in a running
model (measured on a Zen 5). If there is one chunk and the other method is the fused one, it is called directly.
"""

from __future__ import annotations

import ast
import copy
from inspect import CO_VARARGS, CO_VARKEYWORDS
from types import FunctionType, MethodType
from typing import Any, Callable, Dict, Optional, Set, Tuple

from ..reading.effects import readable
from ..reading.source import value_of

_NAME = "apply_chunking_to_forward"
_known: Set[Callable[..., Any]] = set()  # functions seen to only call the method if there is one chunk


def in_one(fused: FunctionType, apply: Callable[..., Any], method: Any, size: Any, dim: Any, *inputs: Any) -> Any:
    """Compute ``apply(method, size, dim, *inputs)``; ``fused`` is the function that ``method`` had at the rewrite."""
    is_one = type(size) is int and size == 0
    if is_one and type(method) is MethodType and method.__func__ is fused and _is_known(apply):
        return method(*inputs)
    return apply(method, size, dim, *inputs)


def _is_known(apply: Any) -> bool:
    return type(apply) is FunctionType and apply in _known


def _names_known(callee: ast.Name, function: FunctionType) -> bool:
    apply = value_of(callee, function, None) if callee.id == _NAME else None
    if type(apply) is FunctionType and not _is_known(apply) and _hands_on(apply):
        _known.add(apply)
    return _is_known(apply)


def rewritten(
    function: FunctionType, methods: Dict[str, FunctionType], call: Callable[..., ast.expr]
) -> Tuple[Optional[ast.FunctionDef], Dict[str, FunctionType]]:
    """Return a method that runs fused ones on chunks, rewritten to use ``call``; and the fused methods by name.

    The tree is None if the method runs none.
    """
    tree = readable(function) if _NAME in function.__code__.co_names else None
    if tree is None:
        return None, {}
    rewriter = _Rewriter(function, methods, call)
    tree = rewriter.visit(copy.deepcopy(tree))
    return (tree, rewriter.names) if rewriter.names else (None, {})


class _Rewriter(ast.NodeTransformer):
    def __init__(self, function: FunctionType, methods: Dict[str, FunctionType], call: Callable[..., ast.expr]) -> None:
        self._function, self._methods, self._call = function, methods, call
        self.names: Dict[str, FunctionType] = {}

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if not isinstance(node.func, ast.Name) or node.keywords or len(node.args) < 4:
            return node
        method, _, _, *inputs = node.args
        owner = self._function.__code__.co_varnames[0]
        name = method.attr if isinstance(method, ast.Attribute) and ast.unparse(method.value) == owner else None
        fused = self._methods.get(name)
        is_plain = not any(isinstance(argument, ast.Starred) for argument in node.args)
        is_taken = fused is not None and is_plain and _takes(fused, len(inputs))
        if not is_taken or not _names_known(node.func, self._function):
            return node
        self.names[f"@{name}"] = fused
        return self._call(ast.Name(f"@{name}", ast.Load()), node.func, *node.args)


def _takes(function: FunctionType, inputs: int) -> bool:
    code = function.__code__
    others = code.co_kwonlyargcount or code.co_flags & (CO_VARARGS | CO_VARKEYWORDS) or hasattr(function, "__wrapped__")
    return code.co_argcount == 1 + inputs and not others


class _Probe:
    def __init__(self) -> None:
        self.given: list = []

    def method(self, value: Any) -> Any:
        self.given.append(value)
        return self


def _hands_on(apply: FunctionType) -> bool:
    """True if a function with a chunk size of 0 calls the method once and returns its result."""
    probe, value = _Probe(), object()
    return apply.__module__ == "transformers.pytorch_utils" and (
        apply(probe.method, 0, 1, value) is probe and probe.given == [value]
    )
